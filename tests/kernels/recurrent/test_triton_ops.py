"""The Triton kernels of recurrent layers (interpreter, or a GPU) against token after token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.kernels.recurrent import DeltaHeads, GatedNorm, StateStep, reference
from app.kernels.recurrent.triton_ops import OPS
from tests.kernels.recurrent import cases, checks
from tests.kernels.recurrent.cases import CASES

ODD = DeltaHeads(num_keys=1, num_values=2, key_dim=24, value_dim=40)  # no powers of 2
EVEN = DeltaHeads(num_keys=1, num_values=2, key_dim=16, value_dim=16)


@pytest.mark.parametrize("name", list(CASES))
def test_causal_conv(name: str) -> None:
    checks.check_conv(OPS, CASES[name], 4, has_bias=name != "mixed", activate=name != "decode")


def test_causal_conv_of_as_many_requests_as_tokens_where_some_have_none() -> None:
    """As in a captured step with room for more prompts than came."""
    made = {name: torch.tensor(value, dtype=torch.int32, device=cases.DEVICE) for name, value in {
        "starts": [0, 1, 3, 3], "slots": [2, 5, -1], "sources": [2, 5, -1], "row_of_token": [0, 1, 1],
    }.items()}  # fmt: skip
    step = StateStep(**made, num_short=1, short_len=1, chunks=torch.empty(0, 2, dtype=torch.int32))
    x, weight = cases.wide(3, 40, 1), cases.randn(40, 4, seed=2)
    states = [cases.randn(cases.SLOTS, 3, 40, seed=3) for _ in range(2)]
    truth, found = (
        ops.causal_conv(x, weight, None, left, step, activate=True)
        for ops, left in zip((reference.OPS, OPS), states, strict=True)
    )
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", list(CASES))
def test_gated_delta(name: str) -> None:
    checks.check_delta(OPS, CASES[name], ODD if name in ("mixed", "decode") else EVEN)


@pytest.mark.parametrize("name", ["decode-padded", "drafts-padded"])
def test_a_state_goes_by_in_parts(name: str) -> None:
    checks.check_delta(OPS, CASES[name], DeltaHeads(num_keys=1, num_values=1, key_dim=128, value_dim=72))


@pytest.mark.parametrize("name", list(CASES))
def test_channel_delta(name: str) -> None:
    heads = DeltaHeads(2, 2, 24, 40) if name in ("mixed", "decode") else DeltaHeads(1, 1, 16, 16)
    checks.check_channel_delta(OPS, CASES[name], heads)


@pytest.mark.parametrize("name", list(CASES))
def test_state_space(name: str) -> None:
    limit = (0.05, 0.5) if name == "mixed" else (0.0, float("inf"))
    checks.check_space(OPS, CASES[name], limit)


@pytest.mark.parametrize("name", list(CASES))
def test_selective_scan(name: str) -> None:
    checks.check_scan(OPS, CASES[name])


@pytest.mark.parametrize(("groups", "norms_first", "sigmoid"), [(1, False, False), (3, True, True), (1, True, False)])
def test_gated_norm(groups: int, norms_first: bool, sigmoid: bool) -> None:
    """One weight of each channel, or the same ones for all groups."""
    x, gate = cases.randn(5, 3, 40, seed=1), cases.wide(5, 120, 2)
    norm = GatedNorm(gate, cases.randn(groups * 40, seed=3), 1e-5, norms_first, sigmoid)
    torch.testing.assert_close(OPS.gated_norm(x, norm), reference.gated_norm(x, norm), rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """A prompt beside others, and alone: the same bits."""
    case, alone, heads = cases.Case([7, 63], [False, True]), cases.Case([63], [True]), EVEN
    mixed, gates, norm = cases.delta_inputs(case, heads)
    step, part = cases.step_of(case), slice(7, 70)
    states = cases.states(heads.num_values, heads.value_dim, heads.key_dim, step=step)
    together = OPS.gated_delta(mixed, heads, gates, norm, states, step)
    own_gates = replace(gates, a=gates.a[part], b=gates.b[part])
    own_norm = type(norm)(norm.gate[part], norm.weight, norm.eps)
    own = OPS.gated_delta(mixed[part], heads, own_gates, own_norm, torch.full_like(states, 7.0), cases.step_of(alone))
    assert torch.equal(own, together[part])


@pytest.mark.parametrize("name", ["decode", pytest.param("mixed", marks=pytest.mark.slow)])
def test_states_of_16_bits(name: str) -> None:
    """Read and left in their own type, and rounded nowhere else."""
    case, heads = CASES[name], EVEN
    mixed, gates, norm = cases.delta_inputs(case, heads)
    step = cases.step_of(case)
    found = cases.states(heads.num_values, heads.value_dim, heads.key_dim, step=step).half()
    expected = found.clone()
    out = OPS.gated_delta(mixed, heads, gates, norm, found, step)
    wanted = reference.OPS.gated_delta(mixed, heads, gates, norm, expected, step)
    live = case.num_tokens - case.padded * max(case.each, 1)
    torch.testing.assert_close(out[:live], wanted[:live], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.nan_to_num(), expected.nan_to_num(), atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(
    ("op", "heads"),
    [
        ("gated_delta", DeltaHeads(2, 4, 128, 128)),
        ("gated_delta", DeltaHeads(4, 4, 96, 192)),
        ("channel_delta", DeltaHeads(4, 4, 128, 128)),
    ],
    ids=["qwen", "olmo", "kimi"],
)
def test_in_16_bits(op: str, heads: DeltaHeads, name: str, dtype: torch.dtype) -> None:
    """Rounded inputs through the kernels, and through the reference in fp32."""
    case = CASES[name]
    mixed, gates, norm = cases.delta_inputs(case, heads, by_channel=op == "channel_delta")
    mixed, norm = mixed.to(dtype), replace(norm, gate=norm.gate.to(dtype))
    step = cases.step_of(case)
    states = cases.states(heads.num_values, heads.value_dim, heads.key_dim, step=step)
    expected = getattr(reference.OPS, op)(
        mixed.float(), heads, gates, replace(norm, gate=norm.gate.float()), states.clone(), step
    )
    found = getattr(OPS, op)(mixed, heads, gates, norm, states, step)
    live = case.num_tokens - case.padded * max(case.each, 1)
    assert ((found.float() - expected)[:live].abs().max() / expected[:live].abs().max()) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(CASES))
def test_state_space_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """The same of Mamba 2: heads of 64 numbers, groups of 128 states."""
    case = CASES[name]
    inputs, step = cases.space_inputs(case, 4, 64, 2, 128), cases.step_of(case)
    rounded = replace(inputs, **{part: getattr(inputs, part).to(dtype) for part in ("x", "b", "c", "dt")})
    exact = replace(rounded, **{part: getattr(rounded, part).float() for part in ("x", "b", "c", "dt")})
    states = cases.states(4, 64, 128, step=step)
    expected = reference.OPS.state_space(exact, states.clone(), step)
    found = OPS.state_space(rounded, states, step)
    live = case.num_tokens - case.padded * max(case.each, 1)
    assert ((found.float() - expected)[:live].abs().max() / expected[:live].abs().max()) < 0.03
