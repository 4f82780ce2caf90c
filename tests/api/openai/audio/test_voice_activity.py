"""Voice activity: speech over silence and over noise, clicks, and samples in pieces of any size."""

from __future__ import annotations

import numpy as np
import pytest

from app.api.openai.audio.voice_activity import Change, VoiceActivity

RATE = 24_000


def noise(seconds: float, level: float, seed: int = 0) -> np.ndarray:
    """Of a level in dB of full scale."""
    made = np.random.default_rng(seed).normal(0, 32_768 * 10 ** (level / 20), round(seconds * RATE))
    return np.clip(made, -32_768, 32_767).astype(np.int16)


def changes(wave: np.ndarray, step: int = RATE // 10, threshold: float = 0.5) -> list[Change]:
    voice = VoiceActivity(RATE, threshold, pause_s=0.5)
    return [change for begin in range(0, len(wave), step) for change in voice.feed(wave[begin : begin + step])]


def times(found: list[Change]) -> list[tuple[bool, float]]:
    return [(change.is_begin, change.at / RATE) for change in found]


SPEECH = np.concatenate([noise(1.0, -75), noise(0.8, -25, 1), noise(0.3, -75), noise(0.4, -25, 2), noise(1.0, -75)])


def test_speech_and_its_pause() -> None:
    """A pause of 0.3 s does not end it, one of 0.5 s does."""
    found = times(changes(SPEECH))
    assert [is_begin for is_begin, _ in found] == [True, False]
    assert [at for _, at in found] == pytest.approx([1.0, 3.0], abs=0.04)


@pytest.mark.parametrize("step", [7, 479, 480, 12_345, 1 << 20])
def test_pieces_do_not_matter(step: int) -> None:
    wave = SPEECH[: 2 * RATE] if step == 7 else SPEECH
    assert changes(wave, step) == changes(wave)


def test_a_hum_is_silence_once_it_has_lasted() -> None:
    hum, speech = noise(6.0, -38), noise(0.6, -18, 3)
    found = times(changes(np.concatenate([hum, speech, noise(1.0, -38, 4)])))
    assert [is_begin for is_begin, _ in found] == [True, False, True, False]
    assert found[1][1] < 4.5
    assert found[2][1] == pytest.approx(6.0, abs=0.04)


def test_clicks_and_silence_are_no_speech() -> None:
    wave = noise(3.0, -75)
    wave[RATE : RATE + 480] = 20_000
    assert changes(wave) == []
    assert changes(np.zeros(RATE, np.int16)) == []


def test_a_threshold() -> None:
    wave = np.concatenate([noise(1.0, -75), noise(1.0, -40, 5), noise(1.0, -75)])
    assert len(changes(wave, threshold=0.3)) == 2
    assert changes(wave, threshold=0.9) == []


def test_a_pause_that_is_asked_for() -> None:
    voice = VoiceActivity(RATE, 0.5, pause_s=0.5)
    assert [change.is_begin for change in voice.feed(noise(1.0, -25))] == [True]
    voice.pause()
    assert [change.is_begin for change in voice.feed(noise(1.0, -25, 1))] == [True]
