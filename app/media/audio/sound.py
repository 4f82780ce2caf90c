"""One sound that was decoded: its samples, the quiet points at which it is cut, and the pieces between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.int16]
FRAME_S = 0.02  # whose loudness is compared
QUIET_S = 0.3  # how long it should be quiet around a cut
SEARCH_S = 6.0  # before the end of a piece, where a cut is looked for


@dataclass(slots=True, frozen=True)
class Piece:
    """A stretch of a sound; times are seconds from the sound's beginning."""

    samples: Samples
    begin_s: float
    end_s: float


@dataclass(slots=True, frozen=True)
class Sound:
    """The samples of a file, of one channel, at the rate that a model hears."""

    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / self.rate


class Cutter:
    """Cuts a sound, as its samples come, into pieces of at most so many seconds: each ends where it is quiet, the last
    with the sound."""

    def __init__(self, rate: int, max_s: float) -> None:
        self._rate, self._most = rate, int(max_s * rate)
        self._rest: Samples = np.zeros(0, np.int16)
        self._begin = 0  # of the rest in the sound

    def add(self, samples: Samples) -> Iterator[Piece]:
        """The pieces that are known once these have come."""
        self._rest = np.concatenate((self._rest, samples)) if len(self._rest) else samples
        while len(self._rest) > self._most:
            search = min(self._most // 2, int(SEARCH_S * self._rate))
            yield self._cut(self._quiet_point(self._most - search, self._most))

    def end(self) -> Iterator[Piece]:
        """The last one: no further samples come."""
        if len(self._rest):
            yield self._cut(len(self._rest))

    def _cut(self, end: int) -> Piece:
        begin, samples = self._begin, self._rest[:end].copy()  # a view would keep all that came with it
        self._begin, self._rest = begin + end, self._rest[end:]
        return Piece(samples, begin / self._rate, self._begin / self._rate)

    def _quiet_point(self, begin: int, end: int) -> int:
        """The middle of the quietest stretch of `QUIET_S` between two points; of equally quiet ones the last."""
        frame = int(FRAME_S * self._rate)
        num_frames = (end - begin) // frame
        frames = self._rest[begin : begin + num_frames * frame].reshape(num_frames, frame)
        loudness = np.square(frames, dtype=np.float32).mean(axis=1)
        width = max(1, min(num_frames, round(QUIET_S / FRAME_S)))
        around = np.convolve(loudness, np.full(width, 1 / width, np.float32), "valid")
        last = len(around) - 1 - int(np.argmin(around[::-1]))
        return begin + last * frame + width * frame // 2
