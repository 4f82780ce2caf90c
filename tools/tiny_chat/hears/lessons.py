"""Lessons of `tiny-chat-hears`: windows of sound, and the tokens that are to be written for each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.media.audio.mel import MelFeatures, MelSettings
from tools.tiny_chat.hears import phrases
from tools.tiny_chat.hears.model import (
    END,
    FRAMES,
    MELS,
    NO_TIMES,
    PREVIOUS,
    SILENCE,
    START,
    TIMES,
    WINDOW_S,
    token,
    tokenizer,
)
from tools.tiny_chat.hears.speech import RATE, Synthesizer, heard, spoken

ROW = 40
COUNT = WINDOW_S * RATE
MEL = MelSettings(num_mels=MELS, num_frames=FRAMES)


def words(text: str) -> list[int]:
    """Tokens of a text as a transcript has them."""
    found: list[int] = tokenizer().encode(f" {text}", add_special_tokens=False).ids
    return found


def lesson(synthesizer: Synthesizer, rng: random.Random) -> tuple[npt.NDArray[np.int16], list[int], int]:
    """A window, a row of tokens, and how many of them are given: the others are to be learnt."""
    before = [token(PREVIOUS), *words(phrases.phrase(rng))] if rng.random() < 0.08 else []
    given = len(before) + 1
    if rng.random() < 0.04:
        window, _ = heard(np.zeros(1, np.float32), rng, COUNT)
        row = [*before, token(START), token(SILENCE), token(END)]
    else:
        said = phrases.phrase(rng)
        wave = spoken(synthesizer, rng, said)
        window, begin = heard(wave, rng, COUNT)
        end = min(begin + len(wave) / RATE, WINDOW_S)
        times = [token(TIMES[round(50 * second)]) for second in (begin, end)]
        timed = rng.random() < 0.4
        inner = [times[0], *words(said), times[1]] if timed else [token(NO_TIMES), *words(said)]
        row = [*before, token(START), *inner, token(END)]
    return np.rint(window * 32_767).astype(np.int16), row[:ROW], given


def worker(seed: int, out: Any, size: int) -> None:
    """Make lessons for good, `size` at a time: windows, rows, and which tokens are to be learnt."""
    synthesizer, rng = Synthesizer(), random.Random(seed)
    while True:
        windows = np.zeros((size, COUNT), np.int16)
        rows, learnt = np.full((size, ROW), token(END), np.int16), np.zeros((size, ROW), np.bool_)
        for place in range(size):
            windows[place], row, given = lesson(synthesizer, rng)
            rows[place, : len(row)] = row
            learnt[place, given : len(row)] = True
        out.put((windows, rows, learnt))


class Ears:
    """Mel features of many windows at once, on a device; those of MelFeatures."""

    def __init__(self, device: str) -> None:
        one = MelFeatures(MEL)
        self._window = torch.from_numpy(one._window).float().to(device)
        self._filters = torch.from_numpy(one._filters).float().to(device)

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        """Int16 [n, samples] -> [n, mels, frames]."""
        waves = windows.float() / 32_768
        spectrum = torch.stft(waves, 400, 160, window=self._window, return_complex=True)[..., :-1]
        power = spectrum.abs().square().transpose(1, 2) @ self._filters
        logs = power.clamp(min=1e-10).log10()
        logs = torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8.0)
        return ((logs + 4.0) / 4.0).transpose(1, 2)
