"""Logprobs of `LLM`'s answers beside those of transformers, in chunks of prompts and from decode steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from tests.tiny_models import hf_model


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 331) for _ in range(length)] for length in lengths]


def check_logprobs(directory: Path, device: str, within: float, judge: Path | None = None, **options: Any) -> None:
    """Every logprob is transformers' and every token a most likely one, both `within` so much; `judge`: the checkpoint
    that transformers reads, if it is another one."""
    largest, _ = logprob_errors(directory, device, judge, **options)
    assert largest < within


def logprob_errors(directory: Path, device: str, judge: Path | None = None, **options: Any) -> tuple[float, float]:
    """How far logprobs of prompts and answers are from transformers', and answers from its most likely tokens: the
    largest of all, and the mean."""
    asked = prompts((3, 16, 37, 70))
    engine = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 64, **options}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(directory), tokenizer=str(ASSETS / "tiny-chat"), device=device, max_model_len=128, **engine) as llm:
        answers = llm.generate(asked, params, use_tqdm=False)
    return errors_of(hf_model(judge or directory), asked, answers)


def errors_of(judge: PreTrainedModel, asked: list[list[int]], answers: Sequence[Any]) -> tuple[float, float]:
    """The same of answers that have been given."""
    errors = []
    for prompt, answer in zip(asked, answers, strict=True):
        tokens = [*prompt, *answer.outputs[0].token_ids]
        with torch.inference_mode():
            exact = torch.log_softmax(judge(torch.tensor([tokens])).logits[0], dim=-1)[:-1]
        assert answer.prompt_logprobs is not None
        assert answer.outputs[0].logprobs is not None
        found = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
        for token, line, entry in zip(tokens[1:], exact, found, strict=True):
            assert entry is not None
            assert entry.token_ids[0] == token
            errors.append(abs(float(entry.logprobs[0]) - float(line[token])))
        behind = exact[len(prompt) - 1 :]
        chosen = behind.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
        errors.append(float((behind.max(dim=1).values - chosen).max()))
    assert all(map(math.isfinite, errors))
    return max(errors), sum(errors) / len(errors)


def answer_error(judge: PreTrainedModel, prompt: list[int], answer: Any) -> float:
    """How far the logprobs of one answer are from transformers', or its tokens from the most likely ones."""
    tokens = [*prompt, *answer.token_ids]
    with torch.inference_mode():
        exact = torch.log_softmax(judge(torch.tensor([tokens])).logits[0], dim=-1)[len(prompt) - 1 : -1]
    chosen = exact.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    given = torch.tensor([entry.logprobs[0] for entry in answer.logprobs])
    return max(float((chosen - given).abs().max()), float((exact.max(dim=1).values - chosen).max()))
