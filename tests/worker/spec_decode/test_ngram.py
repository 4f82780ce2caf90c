"""The drafter that looks the newest tokens up in what the row has: against a plain search, and in engines, which give
the very tokens, logprobs and ends of plain decoding with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.executor.in_process import InProcessExecutor
from app.kernels.rows import RowColumns
from app.offline.llm import LLM
from app.records.sampling_params import SamplingParams
from app.worker.spec_decode import create_proposer
from app.worker.spec_decode.base import ProposerContext
from app.worker.spec_decode.ngram import NgramProposer
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.tiny_models import tiny_model
from tests.worker.spec_decode.test_drafting import SHAPE, WISHES, WholeLogprobs, assert_same, generate, make_config

pytestmark = pytest.mark.usefixtures("one_thread")


def drafts_of(known: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The same, token by token: the longest n-gram first, of its places the latest, then copied on and on."""
    for length in range(min(longest, len(known) - 1), shortest - 1, -1):
        for end in range(len(known) - 1, length - 1, -1):
            if known[end - length : end] == known[-length:]:
                said = list(known)
                for ahead in range(count):
                    said.append(said[end + ahead])
                return said[len(known) :]
    return [known[-1]] * count


def columns_of(token_ids: np.ndarray[Any, Any], known: list[int]) -> RowColumns:
    spare = torch.full((2,), 10**6, dtype=torch.int32)
    flat = torch.cat((torch.from_numpy(token_ids).int().flatten(), spare))
    none, counts = torch.zeros(len(known), dtype=torch.int32), torch.tensor(known, dtype=torch.int32)
    return RowColumns(none, counts, flat, none[:, None], token_ids.shape[1], 4)


def propose(proposer: NgramProposer, columns: RowColumns, rows: list[int]) -> list[list[int]]:
    count = proposer.num_draft_tokens
    proposal: Any = SimpleNamespace(columns=columns, rows=torch.tensor(rows), num_drafts=count)
    drafts: list[list[int]] = proposer.propose(proposal).tolist()
    return drafts


@pytest.mark.parametrize(("count", "shortest", "longest"), [(1, 1, 1), (3, 1, 3), (4, 2, 5), (8, 5, 5), (5, 3, 20)])
def test_drafts_are_those_of_a_plain_search(count: int, shortest: int, longest: int) -> None:
    """Over histories of few different tokens, from one token to as many as a row holds; a row may stand there twice."""
    rng, proposer, found = np.random.default_rng(count), NgramProposer(count, shortest, longest), 0
    for round_ in range(60):
        num_rows, width = int(rng.integers(1, 9)), int(rng.integers(20, 60))
        token_ids = rng.integers(0, 2 + round_ % 4, (num_rows, width))
        known = [1, width, *rng.integers(1, width + 1, num_rows).tolist()][-num_rows:]
        rows = rng.integers(0, num_rows, num_rows + 1).tolist()
        expected = [drafts_of(token_ids[row, : known[row]].tolist(), count, shortest, longest) for row in rows]
        assert propose(proposer, columns_of(token_ids, known), rows) == expected
        found += sum(drafts != [drafts[0]] * count for drafts in expected)
    assert count == 1 or found > 20


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # what followed
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest place
        ([0, 1, 2, 7, 5, 1, 2, 8, 0, 1, 2], [7, 5, 1]),  # a longer match before a later one
        ([5, 6, 5, 6, 5], [6, 5, 6]),  # a loop goes on
        ([4, 4], [4, 4, 4]),
        ([1, 2, 3], [3, 3, 3]),  # no match
        ([1], [1, 1, 1]),
    ],
)
def test_examples(history: list[int], drafts: list[int]) -> None:
    token_ids = np.full((1, 16), 3)
    token_ids[0, : len(history)] = history
    assert propose(NgramProposer(3, 1, 3), columns_of(token_ids, [len(history)]), [0]) == [drafts]


def test_a_lookup_longer_than_the_context_is_cut() -> None:
    config = make_config(
        Path("any"), speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 64}
    )
    any_: Any = SimpleNamespace(max_model_len=8)
    proposer = create_proposer(ProposerContext(config, any_, any_, any_, any_, is_last=True))
    assert isinstance(proposer, NgramProposer)
    assert propose(proposer, columns_of(np.zeros((1, 10), int), [10]), [0]) == [[0, 0]]


def test_none_unless_asked_for() -> None:
    context: Any = SimpleNamespace(config=make_config(Path("any")), build=SimpleNamespace(max_model_len=8))
    assert create_proposer(context) is None


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("qwen2", **SHAPE)


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[WholeLogprobs, int]:
    config = make_config(directory)
    return generate(config, InProcessExecutor(config), WISHES)


def drafting(count: int, **lookup: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": count, **(lookup or {"prompt_lookup_min": 1})}


# Penalties, bad words, stop tokens, logprobs; chunked prompts, preemption, prefix hits: those of test_drafting.
@pytest.mark.parametrize(("count", "max_inflight_steps"), [(1, 2), (3, 1), (3, 2), (7, 4)])
def test_every_wish_is_met(
    directory: Path, plain: tuple[WholeLogprobs, int], count: int, max_inflight_steps: int
) -> None:
    config = make_config(
        directory, speculative_config=drafting(count, prompt_lookup_min=1, prompt_lookup_max=3),
        max_inflight_steps=max_inflight_steps,
    )  # fmt: skip
    assert_same(generate(config, InProcessExecutor(config), WISHES)[0], plain[0])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_ranks_and_stages_agree(directory: Path, plain: tuple[WholeLogprobs, int], tp: int, pp: int) -> None:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    config = make_config(directory, executor="local_processes", speculative_config=drafting(3), **sizes)
    assert_same(generate(config, ForkedExecutor(config), WISHES)[0], plain[0])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}}, "required": ["a", "b"]}
PROMPT = [{"role": "user", "content": "Repeat: one two three one two three one two three one two three"}]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "n": 2},
    "stop": {"temperature": 0.0, "stop": ["two"], "logprobs": 1},
    "grammar": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.2},
}


def test_texts_of_the_built_in_model_are_the_same() -> None:
    """Stop strings and grammars, too."""
    asked = [SamplingParams(seed=5, max_tokens=40, **wish) for wish in ASKED.values()]
    sizes: dict[str, Any] = {"max_model_len": 256, "num_threads": 1}
    said = []
    for options in (sizes, {**sizes, "speculative_config": drafting(3)}):
        with LLM("tiny-chat", **options) as llm:
            outputs = llm.chat([PROMPT] * len(asked), asked)
            said.append([[(o.token_ids, o.text, o.finish_reason) for o in output.outputs] for output in outputs])
    assert said[1] == said[0]
