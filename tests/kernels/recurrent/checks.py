"""One implementation of recurrent layers against token after token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from app.kernels.recurrent import DeltaHeads, RecurrentOps, StateStep, reference
from tests.kernels.recurrent import cases
from tests.kernels.recurrent.cases import Case


def check(
    case: Case, shape: tuple[int, ...], run: Callable[[Any, torch.Tensor, StateStep], torch.Tensor], ops: RecurrentOps
) -> None:
    """The same results and the same states behind them; slots that no request has stay as they are. Of drafts some
    stay, of each request another number."""
    step = cases.step_of(case)
    before = cases.states(*shape, step=step)
    states = [before.clone(), before.clone()]
    expected, found = run(reference.OPS, states[0], step), run(ops, states[1], step)
    live = case.num_live
    assert found.shape == expected.shape
    assert found.isfinite().all(), "padding too"
    assert expected[:live].isfinite().all()
    within = 2e-5 if cases.DEVICE == "cpu" else 1e-4  # a GPU adds up in other orders
    torch.testing.assert_close(found[:live], expected[:live], rtol=2e-4, atol=within)
    slots = step.slots
    if step.drafts is not None:  # it is not known yet how many of the tokens stay
        for left in states:
            torch.testing.assert_close(left, before, rtol=0, atol=0, equal_nan=True)
        slots, counts = step.drafts.slots, torch.arange(len(case.counts), device=cases.DEVICE) % case.each + 1
        for one, left in zip((reference.OPS, ops), states, strict=True):
            run(one, left, step.drafts.accepted(counts))
    torch.testing.assert_close(states[1], states[0], rtol=2e-4, atol=within, equal_nan=True)
    written = sum(slot >= 0 for slot in slots.tolist())
    assert int(states[0].flatten(1).isnan().any(1).sum()) == cases.SLOTS - written


def check_conv(ops: RecurrentOps, case: Case, width: int, *, has_bias: bool, activate: bool) -> None:
    channels = 40
    x = cases.wide(case.num_tokens, channels, 1)
    weight, bias = cases.randn(channels, width, seed=2), cases.randn(channels, seed=3) if has_bias else None
    check(
        case,
        (width - 1, channels),
        lambda ops, states, step: ops.causal_conv(x, weight, bias, states, step, activate=activate),
        ops,
    )


def check_delta(ops: RecurrentOps, case: Case, heads: DeltaHeads) -> None:
    mixed, gates, norm = cases.delta_inputs(case, heads)
    check(
        case,
        (heads.num_values, heads.value_dim, heads.key_dim),
        lambda ops, states, step: ops.gated_delta(mixed, heads, gates, norm, states, step),
        ops,
    )


def check_channel_delta(ops: RecurrentOps, case: Case, heads: DeltaHeads) -> None:
    mixed, gates, norm = cases.delta_inputs(case, heads, by_channel=True)
    check(
        case,
        (heads.num_values, heads.value_dim, heads.key_dim),
        lambda ops, states, step: ops.channel_delta(mixed, heads, gates, norm, states, step),
        ops,
    )


def check_space(ops: RecurrentOps, case: Case, limit: tuple[float, float] = (0.0, float("inf"))) -> None:
    inputs = cases.space_inputs(case, 4, 24, 2, 16, limit)
    check(case, (4, 24, 16), lambda ops, states, step: ops.state_space(inputs, states, step), ops)


def check_scan(ops: RecurrentOps, case: Case) -> None:
    inputs = cases.scan_inputs(case, 40, 16)
    check(case, (40, 16), lambda ops, states, step: ops.selective_scan(inputs, states, step), ops)
