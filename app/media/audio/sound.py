"""One sound that was decoded: its samples, the quiet points at which it may be cut, and the pieces between them."""

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

    def pieces(self, max_s: float) -> Iterator[Piece]:
        """All of it in pieces of at most so many seconds, each of which ends where it is quiet, the last at its end."""
        most, begin = int(max_s * self.rate), 0
        while begin < len(self.samples):
            end = len(self.samples)
            if end - begin > most:
                end = self._quiet_point(begin + most - min(most // 2, int(SEARCH_S * self.rate)), begin + most)
            yield Piece(self.samples[begin:end], begin / self.rate, end / self.rate)
            begin = end

    def _quiet_point(self, begin: int, end: int) -> int:
        """The middle of the quietest stretch of `QUIET_S` between two points; of equally quiet ones the last."""
        frame = int(FRAME_S * self.rate)
        num_frames = (end - begin) // frame
        frames = self.samples[begin : begin + num_frames * frame].reshape(num_frames, frame)
        loudness = np.square(frames, dtype=np.float32).mean(axis=1)
        width = max(1, min(num_frames, round(QUIET_S / FRAME_S)))
        around = np.convolve(loudness, np.full(width, 1 / width, np.float32), "valid")
        last = len(around) - 1 - int(np.argmin(around[::-1]))
        return begin + last * frame + width * frame // 2
