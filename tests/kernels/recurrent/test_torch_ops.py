"""Recurrent layers as a CPU runs them, against token after token."""

from __future__ import annotations

import pytest

from app.kernels.recurrent import DeltaHeads
from app.kernels.recurrent.torch_ops import OPS
from tests.kernels.recurrent import checks
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


@pytest.mark.parametrize("name", list(CASES))
def test_selective_scan(name: str) -> None:
    checks.check_scan(OPS, CASES[name])
