"""Reads pictures, videos and sounds: a file in, pixels and identity out, each file once as long as it is remembered."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from app.config.media import MediaConfig
from app.errors import InvalidRequestError, OverloadedError, UnsupportedError
from app.media.audio.reader import SoundReader
from app.media.audio.sound import Piece
from app.media.audio.sound_processor import SoundProcessor
from app.media.decoders import Decoded, Decoders
from app.media.header import Header, check_size, read_header
from app.media.picture import Picture, PictureCache, digest_of
from app.media.processors.base import Layout, MediaProcessor, Pixels, Processor
from app.media.videos.clip import RawVideo
from app.media.videos.reader import VideoReader
from app.media.videos.video_processor import VideoProcessor
from app.records.media import MediaKind
from app.registry import load_entry

if TYPE_CHECKING:
    from app.media.fetching import Fetcher


Fetch = Callable[[str, Callable[[int], None], MediaKind, int | None], Awaitable[bytes]]  # see Fetcher.fetch


def _load_fetcher(config: MediaConfig) -> Fetcher:
    """Loaded where a host is allowed: its HTTP client takes a fifth of an ingress's time to import what is ours."""
    make: type[Fetcher] = load_entry("app.media.fetching:Fetcher")
    return make(config)


async def _fetch_nothing(url: str, hold: Callable[[int], None], kind: MediaKind, max_bytes: int | None) -> bytes:
    raise UnsupportedError("is not fetched: this server takes pictures as data URLs only, and sounds as data")


class MediaReader:
    """All pictures of one process go through one, its `sounds` and its `videos`. `key` is the cluster's secret:
    identities are the same everywhere.

    May be called from any thread. Messages of errors go on behind the name of a field (`in_field`).
    """

    def __init__(self, config: MediaConfig, key: bytes) -> None:
        self.config = config
        self._key = key
        self._decoders = Decoders(config)
        self._cache = PictureCache(config.cache_bytes)
        self.fetch: Fetch = _load_fetcher(config).fetch if config.allowed_media_domains else _fetch_nothing
        self.sounds = SoundReader(config, key)
        self.videos = VideoReader(config, key)

    def _header(self, data: bytes) -> Header:
        return read_header(data, self.config.max_image_pixels, self.config.max_image_side)

    def layout(self, data: bytes, processor: Processor) -> Layout:
        """A file's place in a prompt by its header alone: one that lies on its side may differ."""
        header = self._header(data)
        return processor.layout((header.width, header.height))

    def read(self, data: bytes | Pixels, family: str, processor: Processor, tenant: str = "") -> Picture:
        """The picture in a file, as a processor of this family prepares it for a tenant, which blocks on a process; or
        pixels [H, W, 3] of this program's own.

        InvalidRequestError says what is wrong with the file, OverloadedError that nobody could look.
        """
        asked = self._named(family, processor, tenant)
        if not isinstance(data, bytes):
            return self._read_pixels(data, processor, asked)
        header = self._header(data)

        def seen() -> Picture:
            return self._picture(self._decoders.decode(data, header, family, processor.settings), processor, asked)

        return self._kept([b"file", *asked, data], seen)

    def _read_pixels(self, image: Pixels, processor: Processor, asked: list[bytes]) -> Picture:
        height, width, _ = image.shape
        check_size(width, height, self.config.max_image_pixels, self.config.max_image_side)
        given = np.ascontiguousarray(image).tobytes()

        def seen() -> Picture:
            pixels = np.ascontiguousarray(processor.pixels(image, processor.layout((width, height))))
            return self._picture(Decoded((width, height), pixels.shape, pixels.tobytes()), processor, asked)

        return self._kept([b"pixels", *asked, json.dumps([width, height]).encode(), given], seen)

    def read_sound(
        self, data: bytes, family: str, processor: SoundProcessor, max_s: float, tenant: str = ""
    ) -> Picture:
        """The same of the sound in a file, which lasts at most `max_s` seconds."""
        asked = self._named(family, processor, tenant)
        parts = [b"sound file", *asked, data]
        return self._kept(parts, lambda: self.sounds.read(data, processor, max_s, asked), max_s)

    def read_piece(self, piece: Piece, family: str, processor: SoundProcessor, tenant: str = "") -> Picture:
        """The same of a piece of a sound that is decoded; it is not remembered."""
        return self.sounds.prepared(piece, processor, self._named(family, processor, tenant))

    def read_video(
        self,
        video: bytes | RawVideo,
        family: str,
        processor: VideoProcessor,
        most_tokens: int,
        tenant: str = "",
    ) -> Picture:
        """The same of a video, in a file or as frames, of at most so many tokens."""
        asked = self._named(family, processor, tenant)
        if isinstance(video, RawVideo):
            parts = [b"frames", *asked, json.dumps(video.clip.as_json()).encode(), video.frames]
        else:
            parts = [b"video file", *asked, video]
        return self._kept(parts, lambda: self.videos.read(video, family, processor, most_tokens, asked), most_tokens)

    def _kept(self, parts: Sequence[bytes], read: Callable[[], Picture], bound: float = 0) -> Picture:
        """Returns what is remembered under these parts, or is read now with this bound of who asks."""
        return self._cache.kept(digest_of(self._key, parts), read, bound)

    def _named(self, family: str, processor: MediaProcessor, tenant: str) -> list[bytes]:
        """Returns whose it is and all that decides what its pixels become."""
        return [tenant.encode(), family.encode(), json.dumps(processor.settings, sort_keys=True).encode()]

    def _picture(self, decoded: Decoded, processor: Processor, asked: list[bytes]) -> Picture:
        layout = processor.layout(decoded.size)
        sizes = json.dumps([decoded.size, layout.grid, decoded.shape]).encode()
        digest = digest_of(self._key, [b"image", *asked, sizes, decoded.pixels])
        return Picture(digest, layout, decoded.shape, decoded.pixels)

    def close(self) -> None:
        """End the processes that decode; idempotent."""
        self._decoders.close()
        self.sounds.close()
        self.videos.close()


@contextmanager
def in_field(field: str) -> Iterator[None]:
    """Errors from inside the block name the field that a picture came in."""
    try:
        yield
    except (InvalidRequestError, OverloadedError) as error:
        raise type(error)(f"{field} {error.message}", param=field) from None
