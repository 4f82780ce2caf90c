"""Reads sounds: a file in, samples out; a piece of them in, features and identity out; or both at once."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from app.config.media import MediaConfig
from app.media.audio.features import FeatureSettings
from app.media.audio.kinds import kind_of
from app.media.audio.ogg_opus import RATE, Stretch, is_opus, seconds, stretches
from app.media.audio.sound import Piece, Samples, Sound
from app.media.audio.sound_processor import SoundProcessor
from app.media.picture import Picture, digest_of
from app.media.processes import ProcessPool

MODULE = "app.media.audio.sound_process"
HEARING_S = 2.0  # CPU time that the features of one piece may take
_PIECE_FRAMES = 3_000
_STRETCH_BYTES = 1 << 18  # of a file, for each of which the limit on time is granted once more


class SoundReader:
    """All sounds of one process go through one. `key` is the cluster's secret: identities are the same everywhere.

    May be called from any thread; calls block on a process. Messages of errors go on behind the name of a field.
    """

    def __init__(self, config: MediaConfig, key: bytes) -> None:
        self.config = config
        self._key = key
        # Two pools, or a piece would wait for whole files of others.
        self._decoding = ProcessPool(MODULE, config.max_decoders, config.decode_memory_bytes)
        self._hearing = ProcessPool(MODULE, config.max_decoders, config.decode_memory_bytes)
        self._threads = ThreadPoolExecutor(config.max_decoders, "sound")  # of files in stretches

    def decode(self, data: bytes, rate: int, max_s: float = math.inf) -> Sound:
        """The sound in a file at a rate, which lasts no longer than `max_s` and the configuration allow.
        InvalidRequestError says what is wrong with the file, UnsupportedError that it is of a kind that is not read,
        OverloadedError that nobody could look."""
        found = [*self.blocks(data, rate, max_s)]
        return Sound(np.concatenate(found) if len(found) > 1 else found[0], rate)

    def blocks(self, data: bytes, rate: int, max_s: float = math.inf) -> Generator[Samples]:
        """The samples of the same, in order, each block as soon as it is decoded."""
        kind = kind_of(data)
        most_s = min(max_s, self.config.max_sound_s)
        # All that is kept of stretches is no more than that: what lasts longer goes to one process, which refuses it.
        parts = stretches(data, most_s) if kind == "opus" else [Stretch(data, None, 0)]
        job = {"do": "decode", "kind": kind, "rate": rate, "max_s": most_s}
        if len(parts) == 1:
            yield from self._decoded(job, parts[0])
            return
        for found in self._threads.map(lambda part: [*self._decoded(job, part)], parts):
            yield from found

    def known_bytes(self, data: bytes, rate: int) -> int:
        """Bytes that the samples of a file will take, as far as the file itself shows it; else 0."""
        length_s = seconds(data) if is_opus(data) else None
        return 0 if length_s is None or length_s > self.config.max_sound_s else 2 * math.ceil(max(0.0, length_s) * rate)

    def _decoded(self, job: Mapping[str, Any], part: Stretch) -> Iterator[Samples]:
        kept, behind = (
            None if count is None else round(count * job["rate"] / RATE) for count in (part.kept, part.behind)
        )
        most_s = self.config.decode_timeout_s * (1 + len(part.data) // _STRETCH_BYTES)
        for _, answer in self._decoding.answers({**job, "kept": kept, "behind": behind}, part.data, most_s):
            yield np.frombuffer(answer, "<i2")

    def features(self, piece: Piece, settings: FeatureSettings) -> bytes:
        """A piece as an encoder hears it: float32 [num_mels, num_frames]. Errors as those of `decode`."""
        job = {"do": "hear", "maker": settings.maker, "settings": settings.as_json()}
        num_pieces = -(-settings.num_frames // _PIECE_FRAMES)
        _, heard = self._hearing.ask(job, piece.samples.tobytes(), HEARING_S * num_pieces)
        return bytes(heard)

    def digest(self, piece: Piece, settings: FeatureSettings, tenant: str = "") -> bytes:
        """A piece's identity: whose it is, how it is heard, and its samples."""
        heard = json.dumps(settings.as_json(), sort_keys=True).encode()
        return digest_of(self._key, [b"audio", tenant.encode(), heard, piece.samples.tobytes()])

    def read(self, data: bytes, processor: SoundProcessor, max_s: float, asked: Sequence[bytes]) -> Picture:
        """The sound in a file, as a processor prepares it; `asked`: all beside its samples that is its identity. Errors
        as those of `decode`."""
        sound = self.decode(data, processor.rate, max_s)
        return self.prepared(Piece(sound.samples, 0.0, sound.seconds), processor, asked)

    def prepared(self, piece: Piece, processor: SoundProcessor, asked: Sequence[bytes]) -> Picture:
        """The same of a piece that is decoded."""
        layout = processor.layout(len(piece.samples))
        whole = processor.heard(layout)
        heard = self.features(piece, whole)
        features = processor.windows(np.frombuffer(heard, "<f4").reshape(whole.num_mels, whole.num_frames))
        digest = digest_of(self._key, [b"audio", *asked, piece.samples.tobytes()])
        return Picture(digest, layout, features.shape, features.tobytes(), "audio")

    def close(self) -> None:
        """End the processes; idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._decoding.close()
        self._hearing.close()
