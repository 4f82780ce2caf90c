"""The rules of transcripts forbid what transformers' processors forbid, whatever was said so far."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import NewRequest
from app.records.transcription_rules import TimeRules, TranscriptionRules
from app.worker.logits_processors.base import SamplingStep
from app.worker.logits_processors.transcription import Transcription

VOCAB, CPU = 60, torch.device("cpu")
END, NO_TIMES, FIRST, LATEST = 30, 39, 40, 45
NEVER, NEVER_FIRST = (3, 7, 8), (5, END)


def judged(said: list[int], begin: int, logits: torch.Tensor, latest: int | None) -> torch.Tensor:
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES, eos_token_id=END, bos_token_id=END,
        max_initial_timestamp_index=None if latest is None else latest - FIRST,
    )  # fmt: skip
    ids, scores = torch.tensor([said]), logits.clone()[None]
    for processor in (
        SuppressTokensLogitsProcessor(NEVER),
        SuppressTokensAtBeginLogitsProcessor(NEVER_FIRST, begin),
        WhisperTimeStampLogitsProcessor(config, begin),  # type: ignore[arg-type]
    ):
        scores = processor(ids, scores)
    return scores[0]


def history(rng: random.Random, count: int) -> list[int]:
    """Tokens as a transcript has them, and some that it never has."""
    said, time = [], FIRST
    while len(said) < count:
        time = min(VOCAB - 1, time + rng.randrange(3))
        said += [time, *(rng.randrange(END) for _ in range(rng.randrange(3)))]
        if rng.random() < 0.8:
            time = min(VOCAB - 1, time + rng.randrange(4))
            said.append(time)
    return said[:count]


@pytest.mark.parametrize("latest", [LATEST, None])
def test_times_and_texts(latest: int | None) -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    processor = Transcription(VOCAB, CPU)
    rules = TranscriptionRules(NEVER, NEVER_FIRST, TimeRules(FIRST, END, latest, (NO_TIMES,)))
    hit = 0
    for _ in range(60):
        prompts = [[FIRST + 3, 50, 31, 32][: rng.randrange(1, 5)] for _ in range(5)]  # times in a prompt count nothing
        said = [prompt + history(rng, rng.choice([0, 0, 1, 2, 3, 5, 8])) for prompt in prompts]
        table = torch.randint(0, VOCAB, (7, 24), dtype=torch.int32, generator=generator)
        places = rng.sample(range(7), 5)
        for row, prompt, whole in zip(places, prompts, said, strict=True):
            table[row, : len(whole)] = torch.tensor(whole)
            asks = () if row == places[2] else (rules,)
            spec = EngineRequest("r", [], SamplingParams(seed=0), asks=asks)
            processor.take(row, NewRequest(row, np.array(prompt, np.int32), len(prompt), 0, [], spec, ()))
        processor.select(np.array(places))
        logits = torch.randn(5, VOCAB, generator=generator) * 2
        lengths = np.array([len(whole) for whole in said])
        edited = logits.clone()
        processor.apply(edited, SamplingStep(torch.tensor(places), lengths, torch.from_numpy(lengths), table))
        for index, (prompt, whole) in enumerate(zip(prompts, said, strict=True)):
            expected = logits[2] if index == 2 else judged(whole, len(prompt), logits[index], latest)
            assert torch.equal(edited[index], expected), whole
            hit += int((expected[:FIRST] == -math.inf).all())
    assert hit > 60  # times were forced


def test_without_times_tokens_alone_are_forbidden() -> None:
    processor = Transcription(VOCAB, CPU)
    spec = EngineRequest("r", [], SamplingParams(seed=0), asks=(TranscriptionRules((3, 99), (5,)),))
    processor.take(0, NewRequest(0, np.array([1, 2], np.int32), 2, 0, [], spec, ()))
    processor.select(np.array([0]))
    for length, gone in ((2, {3, 5}), (3, {3})):
        logits = torch.zeros(1, VOCAB)
        lengths = np.array([length])
        table = torch.zeros(1, 8, dtype=torch.int32)
        processor.apply(logits, SamplingStep(torch.tensor([0]), lengths, torch.from_numpy(lengths), table))
        assert {int(token) for token in (logits[0] == -math.inf).nonzero()} == gone
    processor.drop(0)
    processor.select(np.array([0]))
    assert not processor.active
