"""One picture, video or sound that was read: its place among tokens, pixels, identity; and those that were read
lately."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

from app.media.processors.base import Layout
from app.records.media import DIGEST_BYTES, MediaItem, MediaKind
from app.records.sized_cache import SizedCache


@dataclass(slots=True, frozen=True)
class Picture:
    """A picture or video that a prompt may show, or a sound, wherever it stands there."""

    digest: bytes
    layout: Layout
    shape: tuple[int, ...]
    pixels: bytes  # of a sound its features
    kind: MediaKind = "image"

    def item(self, offset: int, length: int) -> MediaItem:
        """The same at its place in a prompt."""
        grid, seconds = self.layout.grid, self.layout.seconds_per_frame
        return MediaItem(self.kind, self.digest, offset, length, grid, self.shape, self.pixels, seconds)

    def items(self, offset: int, token_ids: Sequence[int], placeholder: int) -> list[MediaItem]:
        """The items that its tokens show from this offset on: itself, or its tiles where text stands between them."""
        if not self.layout.is_apart:
            return [self.item(offset, len(token_ids))]
        found: list[MediaItem] = []
        place, each = offset, len(self.pixels) // self.shape[0]
        for is_shown, run in groupby(token_ids, key=placeholder.__eq__):
            length = len(list(run))
            if is_shown:
                number = len(found)
                digest = blake2b(self.digest + number.to_bytes(4, "little"), digest_size=DIGEST_BYTES).digest()
                pixels, grid = self.pixels[number * each : (number + 1) * each], (1, *self.layout.grid[1:])
                found.append(MediaItem(self.kind, digest, place, length, grid, (1, *self.shape[1:]), pixels))
            place += length
        assert len(found) == self.shape[0], "as many tiles as rows of placeholders"
        return found


def digest_of(key: bytes, parts: Sequence[bytes]) -> bytes:
    """A keyed hash of `parts`, each after its length, so that no two rows of parts are one."""
    found = blake2b(digest_size=DIGEST_BYTES, key=key)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


class PictureCache:
    """Pictures by a digest of their files, for many threads; bounded in bytes. Those who ask at once for one that is
    not here have it read once: they wait where each would wait for a process of its own."""

    def __init__(self, max_bytes: int) -> None:
        self._pictures: SizedCache[Picture] = SizedCache(max_bytes)
        self._reading: dict[tuple[bytes, float], Future[Picture]] = {}  # by the bound, too, under which it is read
        self._lock = threading.Lock()

    def kept(self, key: bytes, read: Callable[[], Picture], bound: float = 0) -> Picture:
        """The picture of a file, which `read` gives where it is not here, and refuses beyond `bound` of who asks; what
        it raises, all who wait for it with that bound raise."""
        flight = key, bound
        with self._lock:
            found = self._pictures.find(key)
            if found is not None:
                return found
            reading = self._reading.get(flight)
            if reading is None:
                own = self._reading[flight] = Future()
        return reading.result() if reading is not None else self._read(flight, read, own)

    def _read(self, flight: tuple[bytes, float], read: Callable[[], Picture], own: Future[Picture]) -> Picture:
        try:
            found = read()
        except BaseException as error:
            self._end(flight, None)
            own.set_exception(error)
            raise
        self._end(flight, found)
        own.set_result(found)
        return found

    def _end(self, flight: tuple[bytes, float], found: Picture | None) -> None:
        """Nobody reads it now; keep it, if one of its size may be kept."""
        with self._lock:
            del self._reading[flight]
            if found is not None:
                self._pictures.keep(flight[0], found, len(found.pixels))
