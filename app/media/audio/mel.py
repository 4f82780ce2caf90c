"""Mel features of a piece of sound, as Whisper and models with its encoder were trained to hear it.

They do what transformers' WhisperFeatureExtractor does, with NumPy alone: its own takes a Python loop of 3,000 rounds
for each piece, or imports torch. The scale of mel and its filters are Slaney's (Auditory Toolbox, 1998).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from app.media.audio.features import Doubles, FeatureSettings, Floats

_BLOCK = 3_000  # frames that are computed at once
_LEAST = 1e-10  # power that counts as silence
_RANGE = 8.0  # decades below the loudest that are told apart
_LINEAR_HZ, _LINEAR_MEL = 1_000.0, 15.0  # up to here mel is linear, three of them 200 Hz
_LOG_STEP = np.log(6.4) / 27.0


@dataclass(frozen=True)
class MelSettings(FeatureSettings):
    """One checkpoint's extractor."""

    maker = "mel"
    rate: int = 16_000
    num_mels: int = 80
    num_frames: int = 3_000  # of a whole piece
    fft: int = 400
    hop: int = 160
    # Samples: fewer have silence behind them, more are all heard. None: those of a whole piece, and more are cut.
    least: int | None = None
    num_windows: int = 1  # of equal length, whose features are each made alone

    @property
    def num_samples(self) -> int:
        """Samples of a whole piece."""
        return self.num_frames * self.hop

    @property
    def seconds(self) -> float:
        """Length of a whole piece."""
        return self.num_samples / self.rate

    def as_json(self) -> dict[str, Any]:
        """The settings as a plain object."""
        return asdict(self)


class MelFeatures:
    """Makes features of pieces, one after the other."""

    def __init__(self, settings: MelSettings) -> None:
        self._settings = settings

    @classmethod
    def of_json(cls, settings: dict[str, Any]) -> MelFeatures:
        """The maker for settings as MelSettings writes them."""
        return cls(MelSettings(**settings))

    def of(self, samples: Floats) -> Floats:
        """[num_mels, num_frames] of a piece's samples; what is missing to a whole piece is silence, what is more is
        cut."""
        own, half = self._settings, self._settings.fft // 2
        if own.num_windows > 1:
            return self._of_windows(samples)
        is_cut, least = own.least is None, own.num_samples if own.least is None else own.least
        given = samples[: own.num_samples if is_cut else None].astype(np.float64)
        padded = np.pad(np.pad(given, (0, max(0, least - len(given)))), half, mode="reflect")
        num_heard = min(own.num_frames, -(-(len(given) + half) // own.hop) + 1)  # the frames behind are silent
        frames = np.lib.stride_tricks.sliding_window_view(padded, own.fft)[:: own.hop][:num_heard]
        logs = np.full((own.num_frames, own.num_mels), np.log10(_LEAST))
        for begin in range(0, num_heard, _BLOCK):  # memory does not grow with the sound
            spectrum = np.fft.rfft(frames[begin : begin + _BLOCK] * self._window)
            power = spectrum.real**2 + spectrum.imag**2
            found = np.log10(np.maximum(power @ self._filters, _LEAST))
            logs[begin : begin + len(found)] = found
        scaled = (np.maximum(logs, logs.max() - _RANGE) + 4.0) / 4.0
        return np.ascontiguousarray(scaled.T, dtype=np.float32)

    def _of_windows(self, samples: Floats) -> Floats:
        own = self._settings
        each = replace(own, num_frames=own.num_frames // own.num_windows, num_windows=1)
        begins = [each.num_samples * index for index in range(own.num_windows)]
        maker = MelFeatures(each)
        return np.concatenate([maker.of(samples[begin : begin + each.num_samples]) for begin in begins], axis=1)

    @cached_property
    def _window(self) -> Doubles:
        return np.hanning(self._settings.fft + 1)[:-1]

    @cached_property
    def _filters(self) -> Doubles:
        """[fft // 2 + 1, num_mels]: triangles of equal area, whose corners are evenly apart in mel."""
        own = self._settings
        hertz = np.linspace(0.0, own.rate // 2, own.fft // 2 + 1)
        corners = _hertz(np.linspace(0.0, _mel(own.rate / 2), own.num_mels + 2))
        widths = np.diff(corners)
        slopes = corners[None, :] - hertz[:, None]
        rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
        areas = 2.0 / (corners[2:] - corners[:-2])
        return np.maximum(0.0, np.minimum(rising, falling)) * areas


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz * 3.0 / 200.0
    return float(_LINEAR_MEL + np.log(hertz / _LINEAR_HZ) / _LOG_STEP)


def _hertz(mels: Doubles) -> Doubles:
    above = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MEL))
    return np.where(mels < _LINEAR_MEL, mels * 200.0 / 3.0, above)
