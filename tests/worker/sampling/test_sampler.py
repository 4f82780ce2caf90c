"""The sampler against analytic distributions (chi-square) and plain references; a row's token minds no neighbour."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from scipy.stats import chisquare

from app.records.request import EngineRequest
from app.records.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from app.records.step import NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep
from app.worker.rows.step_inputs import StepInputs
from app.worker.sampling.sampler import Sampler, SamplerOutput
from app.worker.sampling.sampling_batch import GREEDY_BELOW

VOCAB, CPU = 11, torch.device("cpu")
LOGITS = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 1.5, -3.0, 0.7, 2.2, -0.5, 0.1])


def enter(sampler: Sampler, row: int, choice_index: int = 0, **params: Any) -> None:
    request = NewRequest(
        row=row,
        token_ids=np.array([1], dtype=np.int32),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[],
        spec=EngineRequest("r", [], SamplingParams(**{"seed": 0, **params}), choice_index),
        eos_token_ids=(),
    )
    for feature in sampler.features:
        feature.enter(row, request)


def sample(sampler: Sampler, rows: list[int], logits: torch.Tensor, positions: list[int]) -> SamplerOutput:
    lengths = np.array(positions, dtype=np.int64)
    batch = sampler.select(np.array(rows, dtype=np.int64))
    history = torch.zeros(1 + max(rows), 1 + max(positions), dtype=torch.int32)
    step = SamplingStep(batch.device_rows, lengths, torch.from_numpy(lengths), history)
    return sampler.sample(logits.clone(), batch, step)


def test_processors_are_built_once_for_rows_with_drafts() -> None:
    """Whether rows are plain is asked of the rows, what they want is made for their logits: of several a row, here."""
    sampler = Sampler(StepInputs(3), 3, VOCAB, CPU)
    for row, penalty in enumerate((0.5, 0.0, 0.0)):
        enter(sampler, row, presence_penalty=penalty)
    built: list[list[int]] = []
    for processor in sampler.features[:-1]:
        assert isinstance(processor, LogitsProcessor)
        processor.build = lambda indices, _: built.append(indices)  # type: ignore[method-assign]
    rows, logits_rows = np.arange(3), np.repeat(np.arange(3), 2)
    for _ in range(3):
        assert not sampler.is_plain(rows)
        sampler.select(logits_rows)
    assert built == [[0, 1]]
    assert sampler.is_plain(rows[1:])
    assert built == [[0, 1]]
    enter(sampler, 1, presence_penalty=0.5)
    assert not sampler.is_plain(rows[1:])


def expected_probabilities(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """temperature, then min_p, then top_k, then top_p, as documented."""
    probs = np.exp(log_softmax(LOGITS.numpy().astype(np.float64) / temperature))
    probs[probs < min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if top_k > 0:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    return np.asarray(probs / probs.sum())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.25},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.85, "min_p": 0.05},
    ],
    ids=str,
)
def test_distribution(params: dict[str, float]) -> None:
    draws, counts = 20_000, np.zeros(VOCAB)
    sampler = Sampler(StepInputs(draws), draws, VOCAB, CPU)  # few seeds, many positions: all draw independent numbers
    for row in range(draws):
        enter(sampler, row, **{"seed": row % 7, **params})
    found = sample(sampler, list(range(draws)), LOGITS.expand(draws, VOCAB), list(range(draws))).token_ids
    np.add.at(counts, found.numpy(), 1)
    expected = expected_probabilities(**params)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    assert chisquare(counts[kept], expected[kept] * draws).pvalue > 1e-3


def test_choices_and_seeds_draw_independent_numbers() -> None:
    sampler, draws = Sampler(StepInputs(2), 2, VOCAB, CPU), 3000
    for left, right in (({"seed": 1}, {"seed": 2}), ({"choice_index": 0}, {"choice_index": 1})):
        enter(sampler, 0, **left)
        enter(sampler, 1, **right)
        pairs = torch.stack(
            [sample(sampler, [0, 1], LOGITS.expand(2, VOCAB), [i, i]).token_ids for i in range(draws)]
        ).numpy()
        joint = np.zeros((VOCAB, VOCAB))
        np.add.at(joint, (pairs[:, 0], pairs[:, 1]), 1)
        expected = np.outer(expected_probabilities(), expected_probabilities()) * draws
        likely = expected > 5
        tail = draws - joint[likely].sum(), draws - expected[likely].sum()
        assert chisquare([*joint[likely], tail[0]], [*expected[likely], tail[1]]).pvalue > 1e-3


def test_the_batch_does_not_matter() -> None:
    """I6: alone, in a batch, in another row, in another order, beside greedy rows: the same token."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"temperature": 0.5, "top_k": 3},
        {"min_p": 0.1, "seed": 9},
        {"seed": 9, "choice_index": 3},
        {"logprobs": 2},
        {"frequency_penalty": 1.0, "logit_bias": {3: 4.0}},
    ]
    torch.manual_seed(0)
    logits = torch.randn(len(kinds), VOCAB) * 2
    together = Sampler(StepInputs(16), 16, VOCAB, CPU)
    alone = []
    for i, kind in enumerate(kinds):
        enter(together, i, **kind)
        single = Sampler(StepInputs(16), 16, VOCAB, CPU)
        enter(single, 5, **kind)
        alone.append([int(sample(single, [5], logits[i : i + 1], [p]).token_ids[0]) for p in range(3, 40)])
    for order in (list(range(len(kinds))), list(reversed(range(len(kinds))))):
        for p in range(3, 40):
            tokens = sample(together, order, logits[order], [p] * len(order)).token_ids.tolist()
            assert tokens == [alone[i][p - 3] for i in order]


def test_greedy_is_argmax_and_tiny_temperatures_do_not_overflow() -> None:
    sampler = Sampler(StepInputs(3), 3, VOCAB, CPU)
    for row, temperature in enumerate((0.0, 1e-30, 1e-4)):
        enter(sampler, row, temperature=temperature)
    assert sample(sampler, [0, 1, 2], LOGITS.expand(3, VOCAB), [1, 1, 1]).token_ids.tolist() == [8, 8, 8]


def test_a_row_is_what_its_last_request_said() -> None:
    sampler = Sampler(StepInputs(2), 2, VOCAB, CPU)
    enter(sampler, 0, temperature=0.0, allowed_token_ids=(3,))
    assert sample(sampler, [0], LOGITS[None], [1]).token_ids.tolist() == [3]
    for feature in sampler.features:
        feature.leave(0)
    enter(sampler, 0, temperature=0.0)
    assert sample(sampler, [0], LOGITS[None], [1]).token_ids.tolist() == [8]


def test_logprobs_are_raw_and_ranked() -> None:
    """Logprobs are those of the model's own logits: before bias, penalties and temperature."""
    sampler = Sampler(StepInputs(4), 4, VOCAB, CPU)
    enter(sampler, 0, temperature=0.0, logit_bias={4: 100.0}, logprobs=3)
    enter(sampler, 1, temperature=0.0)
    enter(sampler, 2, temperature=0.3, logprobs=0)
    enter(sampler, 3, temperature=0.0, logprobs=-1)
    logits = torch.randn(4, VOCAB)
    output = sample(sampler, [0, 1, 2, 3], logits, [1, 1, 1, 1])
    batch = sampler.select(np.arange(4))
    assert batch.logprob_indices == [0, 2, 3]
    assert output.logprobs is not None
    entries = output.logprobs.tolist(batch.logprob_counts)
    for entry, row, count in zip(entries, (0, 2, 3), (3, 0, VOCAB), strict=True):
        exact = log_softmax(logits[row].numpy())
        order = np.argsort(-exact)
        chosen = int(output.token_ids[row])
        assert entry.token_ids == [chosen, *order[:count].tolist()]
        np.testing.assert_allclose(entry.logprobs, exact[entry.token_ids], rtol=1e-5)
        assert entry.ranks == [1 + order.tolist().index(chosen), *range(1, count + 1)]
    assert int(output.token_ids[0]) == 4


def test_named_tokens_are_reported_with_their_ranks() -> None:
    """Instead of the most likely, in their order; a neighbour gets its own most likely, and a row's next request
    too."""
    sampler = Sampler(StepInputs(3), 3, VOCAB, CPU)
    enter(sampler, 0, temperature=0.0, logit_bias={4: 100.0}, logprobs=0, logprob_token_ids=(7, 2, 7, 0))
    enter(sampler, 1, temperature=0.0, logprobs=5)
    enter(sampler, 2, temperature=0.0, logprobs=5, logprob_token_ids=(4,))
    logits = torch.randn(3, VOCAB)
    output = sample(sampler, [0, 1, 2], logits.clone(), [1, 1, 1])
    assert output.logprobs is not None
    entries = output.logprobs.tolist(sampler.select(np.arange(3)).logprob_counts)
    for row, entry in enumerate(entries):
        exact = log_softmax(logits[row].numpy())
        order = np.argsort(-exact).tolist()
        chosen = int(output.token_ids[row])
        assert entry.token_ids == [chosen, *((7, 2, 0), order[:5], (4,))[row]]
        np.testing.assert_allclose(entry.logprobs, exact[entry.token_ids], rtol=1e-5)
        assert entry.ranks == [1 + order.index(token) for token in entry.token_ids]
    enter(sampler, 0, temperature=0.0, logprobs=1)
    output = sample(sampler, [0], logits[:1].clone(), [1])
    assert output.logprobs is not None
    best = int(logits[0].argmax())
    assert output.logprobs.tolist([1])[0].token_ids == [best, best]


def test_no_logprobs_no_work() -> None:
    sampler = Sampler(StepInputs(1), 1, VOCAB, CPU)
    enter(sampler, 0, temperature=0.0)
    assert sample(sampler, [0], LOGITS[None], [1]).logprobs is None


EXTREMES = {
    "temperature": [GREEDY_BELOW, MAX_TEMPERATURE],
    "repetition_penalty": [MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY],
    "frequency_penalty": [-2.0, 2.0],
    "logit_bias": [{3: -MAX_LOGIT_BIAS, 4: MAX_LOGIT_BIAS}, {1: MAX_LOGIT_BIAS}],
    "top_p": [1e-300, 1.0],
    "min_p": [0.0, 1e-300, 1.0],
}


@pytest.mark.parametrize("corner", list(itertools.product(*EXTREMES.values())), ids=str)
def test_no_extreme_overflows(corner: tuple[Any, ...]) -> None:
    """At every corner of the ranges a forbidden token stays forbidden: nothing becomes infinite or no number."""
    params = dict(zip(EXTREMES, corner, strict=True))
    sampler = Sampler(StepInputs(2), 2, VOCAB, CPU)
    enter(sampler, 0, allowed_token_ids=(3, 4), logprobs=1, **params)
    enter(sampler, 1, **params)
    for scale in (1e-3, 1.0, 1e3):
        output = sample(sampler, [0, 1], (LOGITS * scale).expand(2, -1), [20, 20])
        assert int(output.token_ids[0]) in (3, 4)
        assert output.logprobs is not None
        assert torch.isfinite(output.logprobs.logprobs).all()


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "logit_bias"])
@pytest.mark.parametrize("value", [1e39, -1e39, float("nan"), float("inf")])
def test_what_would_overflow_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: {5: value} if field == "logit_bias" else value})


USERS: dict[str, list[dict[str, Any]]] = {
    "AllowedTokenIds": [{"allowed_token_ids": (3,)}],
    "MinTokens": [{"min_tokens": 2, "stop_token_ids": (3,)}],
    "LogitBias": [{"logit_bias": {4: 1.0}}],
    "Penalties": [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}],
}


@pytest.mark.parametrize(("kind", "params"), [(kind, params) for kind, some in USERS.items() for params in some])
def test_a_request_concerns_the_processors_that_read_what_it_brings(kind: str, params: dict[str, Any]) -> None:
    """Of the others none is asked, whatever is said as the default has it."""
    sampler = Sampler(StepInputs(1), 1, VOCAB, CPU)
    asked: list[str] = []
    for processor in sampler._processors:
        name, read = type(processor).__name__, processor.read
        processor.read = lambda request, name=name, read=read: (asked.append(name), read(request))[1]  # type: ignore
    enter(sampler, 0, logit_bias=None, min_tokens=0, presence_penalty=0.0)
    assert (asked, sampler.is_plain(np.array([0]))) == ([], True)
    enter(sampler, 0, **params)
    assert (asked, sampler.is_plain(np.array([0]))) == ([kind], False)
    sampler.leave(0)
    enter(sampler, 0)
    assert sampler.is_plain(np.array([0]))
