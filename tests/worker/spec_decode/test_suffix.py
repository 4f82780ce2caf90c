"""Drafts out of past outputs: those that a plain dictionary gives, of nobody else's; the tokens are those without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.kernels.rows import RowColumns
from app.records.request import EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from app.worker.rows.step_inputs import StepInputs
from app.worker.spec_decode.suffix import LENGTHS, SuffixProposer
from tests.engine.core_driver import KEY, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.spec_decode.test_drafting import (
    SHAPE,
    WISHES,
    WholeLogprobs,
    assert_same,
    generate,
    make_config,
    prompts,
)
from tests.worker.spec_decode.test_ngram import drafts_of
from tests.worker.worker_driver import decode_statically

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, COUNT = 3, 120, 3
DRAFTING: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": COUNT}


class Plain:
    """The same by words: past outputs in a dictionary."""

    def __init__(self) -> None:
        self.past: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}

    def keep(self, root: bytes, text: list[int], first: int, num_new: int) -> None:
        for back in range(min(num_new, COUNT + 1)):
            end = len(text) - COUNT - back
            for length in LENGTHS:
                if end >= max(first, length):
                    self.past[root, tuple(text[end - length : end])] = text[end : end + COUNT]

    def drafts(self, root: bytes, text: list[int]) -> list[int]:
        longest, *shorter = LENGTHS
        own = drafts_of(text, COUNT, LENGTHS[-1], longest)
        has_own = any(
            text[end - length : end] == text[-length:]
            for length in range(LENGTHS[-1], longest + 1)
            for end in range(length, len(text))
        )
        found = None if has_own else self._past(root, text, shorter)
        return self._past(root, text, [longest]) or found or own

    def _past(self, root: bytes, text: list[int], lengths: list[int]) -> list[int] | None:
        keys = [(root, tuple(text[-length:])) for length in lengths if len(text) >= length]
        return next((self.past[key] for key in keys if key in self.past), None)


class Device:
    """A proposer and its rows."""

    def __init__(self) -> None:
        self.inputs = StepInputs(ROWS)
        build: Any = SimpleNamespace(
            device=torch.device("cpu"), max_model_len=WIDTH, groups=SimpleNamespace(tp=SimpleNamespace(size=1))
        )
        context: Any = SimpleNamespace(wanted=SimpleNamespace(most_drafts=COUNT), inputs=self.inputs, build=build)
        self.proposer = SuffixProposer.create(context)
        self.ids = torch.zeros(ROWS * WIDTH + 2, dtype=torch.int32)
        self.known = torch.ones(ROWS, dtype=torch.int32)
        table = torch.zeros(ROWS, 1, dtype=torch.int32)
        self.columns = RowColumns(self.known, self.known, self.ids, table, WIDTH, 4)

    def enter(self, row: int, text: list[int], root: bytes) -> None:
        spec = EngineRequest("r", text, SamplingParams(), placement=Placement(cache_root=root))
        request: Any = SimpleNamespace(num_prompt_tokens=len(text), spec=spec)
        self.proposer.enter(row, request)
        self.grow(row, text, 0)

    def grow(self, row: int, tokens: list[int], known: int) -> None:
        begin = row * WIDTH + known
        self.ids[begin : begin + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.known[row] = known + len(tokens)

    def propose(self, rows: list[int], num_new: list[int]) -> list[list[int]]:
        places = torch.arange(len(rows))
        view: Any = SimpleNamespace(
            row_of_token=places,
            rows={name: torch.from_numpy(line.values[rows]) for name, line in self.inputs.lines.items()},
            tensors=SimpleNamespace(slots=places),
        )
        proposal: Any = SimpleNamespace(
            num_drafts=COUNT,
            rows=torch.tensor(rows),
            num_new=torch.tensor(num_new),
            ends=places,
            columns=self.columns,
            view=view,
        )
        drafts: list[list[int]] = self.proposer.propose(proposal).tolist()
        return drafts


def test_drafts_are_those_of_a_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of two roots come and go, some with texts of before; each step brings a row some tokens. The table is so
    large that no two runs of tokens meet in a place."""
    monkeypatch.setattr("app.worker.spec_decode.suffix.PLACES", 1 << 22)
    rng, device, plain, from_past = np.random.default_rng(0), Device(), Plain(), 0
    for _ in range(6):
        texts, roots, firsts = [], [], []
        for row in range(ROWS):
            root, text = [b"a", b"b"][rng.integers(2)], rng.integers(0, 5, int(rng.integers(1, 12))).tolist()
            device.enter(row, text, root)
            texts, roots, firsts = [*texts, text], [*roots, root], [*firsts, len(text)]
        for _ in range(12):
            num_new = [int(rng.integers(1, COUNT + 2)) for _ in range(ROWS)]
            for row, count in enumerate(num_new):
                new = rng.integers(0, 5, count).tolist()
                device.grow(row, new, len(texts[row]))
                texts[row] = texts[row] + new
            found = device.propose(list(range(ROWS)), num_new)
            known = dict(plain.past)
            for row, count in enumerate(num_new):
                plain.keep(roots[row], texts[row], firsts[row], count)
            assert len(plain.past) >= len(known)
            for row in range(ROWS):
                own = drafts_of(texts[row], COUNT, LENGTHS[-1], LENGTHS[0])
                expected = plain.drafts(roots[row], texts[row])
                assert found[row] == expected
                from_past += expected != own
    assert from_past > 5


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("qwen2", **SHAPE)


@pytest.mark.parametrize("max_inflight_steps", [1, 3])
def test_every_wish_is_met(directory: Path, max_inflight_steps: int) -> None:
    config = make_config(directory)
    plain: tuple[WholeLogprobs, int] = generate(config, InProcessExecutor(config), WISHES)
    config = make_config(directory, speculative_config=DRAFTING, max_inflight_steps=max_inflight_steps)
    assert_same(generate(config, InProcessExecutor(config), WISHES)[0], plain[0])


@pytest.mark.parametrize("static", [False, True])
def test_no_tenant_drafts_from_anothers_outputs(directory: Path, static: bool) -> None:
    """The same prompt a second time is drafted right; of another tenant, as if it had never been."""
    config = make_config(directory, speculative_config=DRAFTING, num_blocks=200)
    executor = InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    if static:
        decode_statically(executor._worker, [1, 2])
    params, prompt = SamplingParams(temperature=0.0, seed=1, max_tokens=24, ignore_eos=True), prompts()[3]
    accepted, truth = [0.0], hf_greedy(hf_model(directory), prompt, 24)
    for name, tenant in (("first", b"a"), ("other", b"b"), ("again", b"a")):
        request = EngineRequest(name, prompt, params, placement=Placement(cache_root=tenant))
        assert run(core, [request]).tokens[name] == truth
        accepted.append(core.stats().figures["accepted_tokens"])
    core.shutdown()
    first, other, again = np.diff(accepted)
    assert other == first
    assert again > first + 8
