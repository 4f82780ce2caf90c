"""Speech for `tiny-chat-hears`, made by espeak-ng as it is needed: some 500 phrases a second on a core."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import random
from typing import Any

import numpy as np
import numpy.typing as npt

RATE = 16_000
VOICES = ("en-us", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-029")
SPEAKERS = ("", "+m1", "+m2", "+m3", "+m4", "+m5", "+m6", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5")
HELD_SPEAKERS = ("+m8", "+max")  # which no training hears
_WORDS, _RATE, _PITCH, _RANGE = 1, 1, 3, 4
_SYNCHRONOUS = 2
Samples = npt.NDArray[np.float32]


class Synthesizer:
    """espeak-ng's library, which speaks into memory. `ESPEAK_LIBRARY` and `ESPEAK_DATA` name another copy of it."""

    def __init__(self) -> None:
        name = os.environ.get("ESPEAK_LIBRARY") or ctypes.util.find_library("espeak-ng") or "libespeak-ng.so.1"
        self._library: Any = ctypes.CDLL(name)
        data = os.environ.get("ESPEAK_DATA")
        self._library.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        self.rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, None if data is None else data.encode(), 0)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._take)  # kept: the library calls it
        self._library.espeak_SetSynthCallback(self._callback)
        self._pieces: list[npt.NDArray[np.int16]] = []

    def _take(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str, *, words_a_minute: int, pitch: int, pitch_range: int) -> Samples:
        """A text at 16 kHz, without the silence around it."""
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"espeak-ng has no voice {voice}")
        for parameter, value in ((_RATE, words_a_minute), (_PITCH, pitch), (_RANGE, pitch_range)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._pieces.clear()
        said = text.encode()
        self._library.espeak_Synth(said, len(said) + 1, 0, 0, 0, 1, None, None)
        wave = np.concatenate(self._pieces).astype(np.float32) / 32_768
        loud = np.flatnonzero(np.abs(wave) > 0.005)
        return _resampled(wave[loud[0] : loud[-1] + 1], self.rate)


def _resampled(wave: Samples, rate: int) -> Samples:
    """At 16 kHz, by the spectrum."""
    count = round(len(wave) * RATE / rate)
    spectrum = np.fft.rfft(wave)[: count // 2 + 1]
    found = np.fft.irfft(spectrum, count) * (count / len(wave))
    return found.astype(np.float32)


def spoken(synthesizer: Synthesizer, rng: random.Random, text: str, *, is_held: bool = False) -> Samples:
    """A text in some voice, at some speed and pitch."""
    speaker = rng.choice(HELD_SPEAKERS if is_held else SPEAKERS)
    return synthesizer.say(
        text, rng.choice(VOICES) + speaker, words_a_minute=rng.randint(110, 210), pitch=rng.randint(20, 80),
        pitch_range=rng.randint(20, 80),
    )  # fmt: skip


def heard(wave: Samples, rng: random.Random, count: int) -> tuple[Samples, float]:
    """A window of `count` samples with the speech somewhere in it, quieter or louder, over some noise; and when the
    speech begins, in seconds."""
    draw = np.random.default_rng(rng.getrandbits(32))
    begin = rng.randrange(max(1, min(RATE, count - len(wave) + 1)))
    window = np.zeros(count, np.float32)
    part = wave[: count - begin]
    window[begin : begin + len(part)] = part
    noise = draw.standard_normal(count).astype(np.float32)
    if rng.random() < 0.5:
        noise = np.convolve(noise, np.full(4, 0.25, np.float32), "same")
    loudness = 10 ** rng.uniform(-3.5, -1.7)
    return (10 ** rng.uniform(-1.0, 0.2) * window + loudness * rng.random() * noise).clip(-1, 1), begin / RATE
