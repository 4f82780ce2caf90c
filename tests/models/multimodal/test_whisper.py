"""Whisper's logits and greedy tokens equal transformers', on tiny random checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from app.models.multimodal.whisper import WhisperForConditionalGeneration
from tests.tiny_sounds import clip, heard, judged, noise, tiny_whisper
from tests.worker.worker_driver import Driver, Run, all_logits, decode_statically, greedy


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 330) for _ in range(count)]


def driver_of(directory: Path, **options: int) -> Driver:
    return Driver(str(directory), num_blocks=64, max_num_seqs=8, **options)  # type: ignore[arg-type]


def test_logits_and_tokens_are_those_of_transformers() -> None:
    directory = tiny_whisper()
    asked = [(noise(seed), words(count, seed)) for seed, count in ((1, 1), (2, 4), (3, 21), (1, 9))]
    expected = [judged(directory, *one, 8) for one in asked]
    assert len({tuple(tokens) for _, tokens in expected}) == len(expected)
    whole = driver_of(directory)
    assert whole.worker._parts is not None
    assert isinstance(whole.worker._parts.model, WhisperForConditionalGeneration)
    for (given, prompt), (logits, _) in zip(asked, expected, strict=True):
        torch.testing.assert_close(all_logits(whole, prompt, given), logits, atol=1e-3, rtol=1e-3)
    chunked = driver_of(directory, chunk=3)
    decode_statically(chunked.worker, [1, 2, 4])
    for driver in (whole, chunked):
        runs = driver.run([Run(prompt, greedy(8), asks=(given,)) for given, prompt in asked])
        assert [run.tokens for run in runs] == [tokens for _, tokens in expected]


@pytest.mark.parametrize("seconds", [0.5, 7.3, 31.0])
def test_clips_of_thirty_seconds(seconds: float) -> None:
    directory = tiny_whisper(num_mels=80, num_positions=1500)
    given, prompt = heard(clip(seconds, 5)), [3, 17, 40]
    logits, tokens = judged(directory, given, prompt, 4)
    driver = driver_of(directory)
    torch.testing.assert_close(all_logits(driver, prompt, given), logits, atol=1e-3, rtol=1e-3)
    (run,) = driver.run([Run(prompt, greedy(4), asks=(given,))])
    assert run.tokens == tokens
