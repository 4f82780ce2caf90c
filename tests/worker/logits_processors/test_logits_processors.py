"""Each logits processor against a plain NumPy account of what its parameter means, alone and with bystanders."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.records.bad_words import BadWords
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import NewRequest
from app.worker.logits_processors import LOGITS_PROCESSORS, create_logits_processors
from app.worker.logits_processors.base import SamplingStep

VOCAB, WIDTH, CPU = 13, 24, torch.device("cpu")


@dataclass
class Row:
    """One request: its tokens so far, of which the first `num_prompt` are the prompt."""

    tokens: list[int]
    num_prompt: int
    params: dict[str, Any]
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def request(self, row: int) -> NewRequest:
        return NewRequest(
            row=row,
            token_ids=np.array(self.tokens, dtype=np.int32),
            num_prompt_tokens=self.num_prompt,
            num_computed_tokens=0,
            block_ids=[],
            spec=EngineRequest("r", [], SamplingParams(seed=0, **self.params), asks=(BadWords(self.bad_words),)),
            eos_token_ids=self.eos,
        )


Reference = Callable[[NDArray[np.float32], Row], None]


def allowed(logits: NDArray[np.float32], row: Row) -> None:
    keep = row.params.get("allowed_token_ids")
    for token in range(VOCAB):
        if keep is not None and token not in keep:
            logits[token] = -np.inf


def bad_words(logits: NDArray[np.float32], row: Row) -> None:
    for word in row.bad_words:
        prefix = list(word[:-1])
        if not prefix or row.output[-len(prefix) :] == prefix:
            logits[word[-1]] = -np.inf


def min_tokens(logits: NDArray[np.float32], row: Row) -> None:
    if len(row.output) < row.params.get("min_tokens", 0):
        logits[[*row.eos, *row.params.get("stop_token_ids", ())]] = -np.inf


def logit_bias(logits: NDArray[np.float32], row: Row) -> None:
    for token, bias in row.params.get("logit_bias", {}).items():
        logits[token] += bias


def penalties(logits: NDArray[np.float32], row: Row) -> None:
    repetition = row.params.get("repetition_penalty", 1.0)
    for token in set(row.tokens):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(row.output):
        logits[token] -= row.params.get("frequency_penalty", 0.0) * row.output.count(token)
        logits[token] -= row.params.get("presence_penalty", 0.0)


CASES: dict[str, tuple[Reference, list[Row]]] = {
    "allowed_token_ids": (
        allowed,
        [Row([1], 1, {"allowed_token_ids": (3, 5)}), Row([1], 1, {"allowed_token_ids": (0, 12)}), Row([1, 2], 1, {})],
    ),
    "bad_words": (
        bad_words,
        [
            Row([5, 6, 7, 8], 1, {}, bad_words=((7, 8, 9), (8, 4), (8, 8), (2,))),
            Row([7, 8], 2, {}, bad_words=((7, 8, 9), (8, 4))),  # the prompt does not count
            Row([1, 7, 8], 2, {}, bad_words=((7, 8, 9), (8, 4))),  # a match must not reach back into the prompt
            Row([1, 2, 3], 1, {}),
            Row([1], 1, {}, bad_words=((1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (11,))),  # longer than all there is
        ],
    ),
    "min_tokens": (
        min_tokens,
        [
            Row([1, 2], 1, {"min_tokens": 2, "stop_token_ids": (4,)}, eos=(3, 9)),
            Row([1, 2, 2], 1, {"min_tokens": 2, "stop_token_ids": (4,)}, eos=(3, 9)),
            Row([1], 1, {"min_tokens": 1}, eos=(5,)),
            Row([1], 1, {}, eos=(5,)),
        ],
    ),
    "logit_bias": (
        logit_bias,
        [Row([1], 1, {"logit_bias": {3: 2.5, 4: -100.0}}), Row([1], 1, {}), Row([1], 1, {"logit_bias": {3: -1.0}})],
    ),
    "penalties": (
        penalties,
        [
            Row([1, 2, 3, 3, 3, 4], 2, {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.3}),
            Row([1, 2, 2], 3, {"repetition_penalty": 0.7}),  # prompt only
            Row([1, 2, 2], 1, {"presence_penalty": -1.0}),
            Row([1, 2, 2, 2, 0, 0], 1, {"frequency_penalty": 2.0}),
            Row([6, 6, 6], 1, {}),
        ],
    ),
}


def history(rows: list[Row], places: list[int]) -> torch.Tensor:
    """Token table of the device; what lies beyond a row's tokens is left over from others."""
    table = torch.randint(0, VOCAB, (8, WIDTH), dtype=torch.int32)
    for place, row in zip(places, rows, strict=True):
        table[place, : len(row.tokens)] = torch.tensor(row.tokens)
    return table


def step(rows: list[Row], places: list[int]) -> SamplingStep:
    lengths = np.array([len(row.tokens) for row in rows])
    return SamplingStep(torch.tensor(places), lengths, torch.from_numpy(lengths), history(rows, places))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("order", [1, -1])
def test_against_numpy(name: str, order: int) -> None:
    reference, rows = CASES[name]
    rows = rows[::order]
    places = [6, 0, 3, 1, 7][: len(rows)]
    processor = LOGITS_PROCESSORS.load(name)(VOCAB, CPU)
    for place, row in zip(places, rows, strict=True):
        processor.take(place, row.request(place))
    logits = torch.randn(len(rows), VOCAB) * 3
    expected = logits.numpy().copy()
    for line, row in zip(expected, rows, strict=True):
        reference(line, row)
    assert not np.array_equal(expected, logits.numpy()), "the case changes nothing"
    processor.select(np.array(places))
    assert processor.active
    processor.apply(logits, step(rows, places))
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_idle_unless_a_selected_row_uses_it(name: str) -> None:
    _, rows = CASES[name]
    user = next(row for row in rows if row.params or row.bad_words)
    processor = LOGITS_PROCESSORS.load(name)(VOCAB, CPU)
    processor.take(2, user.request(2))
    processor.take(4, Row([1], 1, {}).request(4))
    processor.select(np.array([4]))
    assert not processor.active
    processor.select(np.array([4, 2]))
    assert processor.active
    processor.drop(2)
    processor.select(np.array([4, 2]))
    assert not processor.active
    processor.take(2, user.request(2))
    processor.take(2, Row([1], 1, {}).request(2))  # the row went to someone else without being freed first
    processor.select(np.array([2]))
    assert not processor.active


def test_ids_outside_the_vocabulary_are_harmless() -> None:
    """They cannot be produced, so a request that names them must not bring the step down (I7)."""
    row = Row(
        [1],
        1,
        {"allowed_token_ids": (2, 99), "logit_bias": {99: 1.0, 2: 1.0}, "stop_token_ids": (99, 2), "min_tokens": 1},
        bad_words=((99,), (99, 2)),
    )
    logits = torch.zeros(1, VOCAB)
    for processor in create_logits_processors(VOCAB, CPU):
        processor.take(0, row.request(0))
        processor.select(np.array([0]))
        if processor.active:
            processor.apply(logits, step([row], [0]))
    assert (logits == -torch.inf).all()  # 2 is allowed, but would end the answer too early


def test_bad_words_cost_their_length_and_no_padding() -> None:
    """One long word among many short ones, as many times as there are rows."""
    long = tuple(int(token) for token in np.arange(5000) % VOCAB)
    row = Row([1], 1, {}, bad_words=(long, *((token % VOCAB, 3) for token in range(100))))
    processor = LOGITS_PROCESSORS.load("bad_words")(VOCAB, CPU)
    for place in range(8):
        processor.take(place, row.request(place))
    processor.select(np.arange(8))
    held = sum(value.numel() for value in vars(processor).values() if isinstance(value, torch.Tensor))
    assert held < 10 * 8 * sum(map(len, row.bad_words))


def opcodes(function: Callable[[], Any]) -> int:
    """How many Python instructions a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_words", "min_tokens", "logit_bias"])
def test_a_change_of_the_batch_costs_no_python_for_each_entry(name: str) -> None:
    """`select` follows every neighbour that comes or goes; a long list must have been dealt with when it came."""
    costs = []
    for count in (10, 1000):
        ids = tuple(range(1, count + 1))
        lists = {"allowed_token_ids": ids, "stop_token_ids": ids, "logit_bias": dict.fromkeys(ids, 1.0)}
        row = Row([1], 1, {"min_tokens": 1, **lists}, bad_words=tuple((token, token) for token in ids))
        processor = LOGITS_PROCESSORS.load(name)(2000, CPU)
        for place in range(4):
            processor.take(place, row.request(place))
        costs.append(opcodes(functools.partial(processor.select, np.arange(4))))
    assert costs[1] < costs[0] + 100


def test_order_of_the_table() -> None:
    expected = ["grammar", "allowed_token_ids", "bad_words", "min_tokens", "logit_bias", "penalties"]
    expected.append("transcription")
    expected.append("thinking_budget")  # the last word: what it writes is certain
    assert list(LOGITS_PROCESSORS) == expected
