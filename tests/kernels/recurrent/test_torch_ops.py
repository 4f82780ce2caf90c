"""Recurrent layers as a CPU runs them, against token after token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.kernels.recurrent import DeltaHeads, StateStep
from app.kernels.recurrent.torch_ops import OPS
from tests.kernels.recurrent import cases, checks
from tests.kernels.recurrent.cases import CASES

HEADS = DeltaHeads(num_keys=2, num_values=4, key_dim=16, value_dim=24)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("width", "has_bias", "activate"), [(4, False, True), (3, True, False)])
def test_causal_conv(name: str, width: int, has_bias: bool, activate: bool) -> None:
    checks.check_conv(OPS, CASES[name], width, has_bias=has_bias, activate=activate)


@pytest.mark.parametrize("name", list(CASES))
def test_gated_delta(name: str) -> None:
    checks.check_delta(OPS, CASES[name], HEADS)


@pytest.mark.parametrize("name", list(CASES))
def test_channel_delta(name: str) -> None:
    checks.check_channel_delta(OPS, CASES[name], DeltaHeads(2, 2, 16, 24))


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.05, 0.5)])
def test_state_space(name: str, limit: tuple[float, float]) -> None:
    checks.check_space(OPS, CASES[name], limit)


def test_drafts_beside_prompts() -> None:
    """The second and the third of four requests bring some; their tokens are kept, as many places for each."""
    meta = cases.metadata(cases.Case([1, 3, 2, 130], [False, False, False, True]))
    meta.drafted = np.array([1, 2])
    step, plain = StateStep.of(meta), StateStep.of(replace(meta, drafted=None))
    assert plain.drafts is None
    assert step.drafts is not None
    assert step.drafts.tokens is not None
    assert step.drafts.tokens.tolist() == [1, 2, 3, 4, 5, 5]
    assert step.slots.tolist() == [plain.slots[0], -1, -1, plain.slots[3]]
    assert step.sources.equal(plain.sources)
    accepted = step.drafts.accepted(torch.tensor([2, 1], device=cases.DEVICE))
    assert accepted.slots.equal(plain.slots[1:3])
    assert (accepted.starts.tolist(), accepted.ends.tolist()) == ([0, 3, 6], [2, 4])
    assert accepted.row_of_token.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", list(CASES))
def test_selective_scan(name: str) -> None:
    checks.check_scan(OPS, CASES[name])
