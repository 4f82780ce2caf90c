"""Mel features of frames that lie within a sound, each emphasised for itself: Gemma 3n's, Gemma 4's, Phi-4's.

They do what transformers' extractors of those do, with NumPy alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from app.media.audio.features import Doubles, FeatureSettings, Floats

_BLOCK = 3_000  # frames that are computed at once


@dataclass(frozen=True)
class FramedMelSettings(FeatureSettings):
    """One checkpoint's extractor; frames behind the samples hear silence."""

    maker = "framed_mel"
    rate: int
    num_mels: int
    num_frames: int
    frame: int  # samples of one
    hop: int
    fft: int
    low: float  # Hz
    high: float
    emphasis: float = 0.0  # how much of the sample before is taken away
    silence: int = 0  # samples of it before the first
    floor: float = 1e-5
    is_floor_added: bool = False  # to what is heard; else it is the least of it
    power: int = 1  # of magnitudes
    scale: float = 1.0  # of samples
    is_kaldi: bool = False  # a Hamming window, and triangles that are even in mel; else Hann's, and even in Hz
    mean: tuple[float, ...] = ()  # of each mel, which is taken away
    deviation: tuple[float, ...] = ()  # of each mel, by which the rest is divided

    def as_json(self) -> dict[str, Any]:
        """The settings as a plain object."""
        return asdict(self)


class FramedMelFeatures:
    """Makes features of sounds, one after the other."""

    def __init__(self, settings: FramedMelSettings) -> None:
        self._settings = settings

    @classmethod
    def of_json(cls, settings: dict[str, Any]) -> FramedMelFeatures:
        """The maker for settings as FramedMelSettings writes them."""
        lists = {name: tuple(settings[name]) for name in ("mean", "deviation")}
        return cls(FramedMelSettings(**{**settings, **lists}))

    def of(self, samples: Floats) -> Floats:
        """[num_mels, num_frames] of a sound's samples."""
        own = self._settings
        needed = (own.num_frames - 1) * own.hop + own.frame
        given = samples[: max(0, needed - own.silence)].astype(np.float64) * own.scale
        whole = np.concatenate([np.zeros(own.silence), given, np.zeros(needed - own.silence - len(given))])
        frames = np.lib.stride_tricks.sliding_window_view(whole, own.frame)[:: own.hop]
        parts = [self._logs(frames[begin : begin + _BLOCK]) for begin in range(0, own.num_frames, _BLOCK)]
        return np.ascontiguousarray(np.concatenate(parts).T, dtype=np.float32)

    def _logs(self, frames: Doubles) -> Doubles:
        """[n, frame] -> [n, num_mels]."""
        own = self._settings
        if own.emphasis:
            before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
            frames = frames - own.emphasis * before
        heard = np.abs(np.fft.rfft(frames * self._window, n=own.fft)) ** own.power @ self._filters
        logs = np.log(heard + own.floor if own.is_floor_added else np.maximum(heard, own.floor))
        if own.mean:
            logs = logs - np.array(own.mean)
        return logs / np.array(own.deviation) if own.deviation else logs

    @cached_property
    def _window(self) -> Doubles:
        size = self._settings.frame
        return np.hamming(size) if self._settings.is_kaldi else np.hanning(size + 1)[:-1]

    @cached_property
    def _filters(self) -> Doubles:
        """[fft // 2 + 1, num_mels]: triangles whose corners are evenly apart in mel."""
        own = self._settings
        bins = np.arange(own.fft // 2 + 1) * (own.rate / own.fft)
        mels = np.linspace(_mel(own.low), _mel(own.high), own.num_mels + 2)
        places, corners = (_mel(bins), mels) if own.is_kaldi else (bins, _hertz(mels))
        slopes = corners[None, :] - places[:, None]
        widths = np.diff(corners)
        return np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))


def _mel(hertz: Any) -> Any:
    return 2595.0 * np.log10(1.0 + hertz / 700.0)


def _hertz(mels: Doubles) -> Doubles:
    return 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
