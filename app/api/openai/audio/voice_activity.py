"""Voice activity by loudness: speech begins where a sound rises above what was quietest lately, and ends with a pause.

It is the plain method of a server that has one model: the floor is the least loudness of the last seconds (minimum
statistics: Martin, "Noise power spectral density estimation based on optimal smoothing and minimum statistics", 2001),
so that a fan or a hum, however loud, is silence once it has lasted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FRAME_S = 0.02  # whose loudness is told
_FLOOR_FRAMES = 150  # of which the quietest is the floor
_QUIETEST_DB, _FIRST_FLOOR_DB = -80.0, -60.0  # of full scale
_RISE_DB = 20.0  # above the floor, times the threshold
_LOUDEST_NEEDED_DB = 30.0  # above _FIRST_FLOOR_DB, times the threshold
_FRAMES_TO_BEGIN = 3  # of speech in a row: a click is none


@dataclass(slots=True, frozen=True)
class Change:
    """Says where speech begins or ends, in samples from the first one."""

    is_begin: bool
    at: int


class VoiceActivity:
    """Reads samples as they come. `threshold`: 0 to 1, how loud speech must be; `pause_s`: silence that ends it."""

    def __init__(self, rate: int, threshold: float, pause_s: float) -> None:
        self._frame = int(FRAME_S * rate)
        self._rise_db = _RISE_DB * threshold
        self._least_db = _FIRST_FLOOR_DB + _LOUDEST_NEEDED_DB * threshold
        self._pause = max(1, round(pause_s / FRAME_S))
        self._levels: deque[float] = deque([_FIRST_FLOOR_DB] * _FLOOR_FRAMES, _FLOOR_FRAMES)
        self._rest = np.empty(0, np.int16)  # less than a frame
        self._at = 0  # samples of whole frames so far
        self._loud = self._quiet = 0  # frames in a row
        self.is_speech = False

    def feed(self, samples: NDArray[np.int16]) -> list[Change]:
        """Returns what changes with further samples int16 [n], in order."""
        joined = np.concatenate((self._rest, samples))
        count = len(joined) // self._frame
        self._rest = joined[count * self._frame :].copy()
        frames = joined[: count * self._frame].reshape(count, self._frame).astype(np.float32) / 32_768
        power = np.square(frames).mean(axis=1)
        levels = 10.0 * np.log10(np.maximum(power, 10.0 ** (_QUIETEST_DB / 10.0)))
        changes = [self._next(level) for level in levels.tolist()]
        return [change for change in changes if change is not None]

    def pause(self) -> None:
        """End the speech so far: what comes next is another."""
        self.is_speech, self._loud, self._quiet = False, 0, 0

    def _next(self, level: float) -> Change | None:
        self._at += self._frame
        is_loud = level > max(min(self._levels) + self._rise_db, self._least_db)
        self._levels.append(level)
        self._loud, self._quiet = (self._loud + 1, 0) if is_loud else (0, self._quiet + 1)
        if not self.is_speech and self._loud == _FRAMES_TO_BEGIN:
            self.is_speech = True
            return Change(True, self._at - _FRAMES_TO_BEGIN * self._frame)
        if self.is_speech and self._quiet == self._pause:
            self.is_speech = False
            return Change(False, self._at)
        return None
