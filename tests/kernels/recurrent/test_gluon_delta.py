"""Prompts of gated delta nets in Gluon, on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from app.kernels.recurrent import (
    CHUNK,
    DeltaGates,
    DeltaHeads,
    GatedNorm,
    StateStep,
    gluon_delta_chunks,
    gluon_delta_scan,
    reference,
    triton_delta_chunks,
)
from app.kernels.recurrent.delta_tiles import FACTORS, TILES, DeltaTiles
from app.kernels.recurrent.gluon_delta import delta_chunks, serves
from app.kernels.recurrent.gluon_delta_chunks import delta_chunk_gluon_kernel
from app.kernels.recurrent.gluon_delta_scan import delta_scan_gluon_kernel
from tests.kernels.gluon_on_cpu import OnCpu
from tests.kernels.recurrent import cases
from tests.kernels.recurrent.cases import CASES, Case

QWEN = DeltaHeads(2, 4, 128, 128)
Inputs = tuple[torch.Tensor, GatedNorm, DeltaGates]


def inputs(case: Case, heads: DeltaHeads, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    mixed, gates, norm = cases.delta_inputs(case, heads)
    return mixed.to(dtype).contiguous(), replace(norm, gate=norm.gate.to(dtype)), gates


@pytest.mark.parametrize(
    ("heads", "dtype", "is_served"),
    [
        (QWEN, torch.bfloat16, True),
        (DeltaHeads(2, 2, 128, 64), torch.float16, True),
        (QWEN, torch.float32, False),
        (DeltaHeads(2, 2, 96, 192), torch.bfloat16, False),
    ],
)
def test_serves(heads: DeltaHeads, dtype: torch.dtype, is_served: bool) -> None:
    mixed, _, _ = inputs(CASES["prompts"], heads, dtype)
    assert serves(mixed, heads) is is_served
    odd = mixed.new_empty(len(mixed), mixed.shape[1] + 4)
    assert not serves(odd[:, :-4], heads), "rows that the copy engine does not find"
    assert not serves(odd[:, 4:], heads)


@pytest.mark.parametrize("name", ["prompts", "mixed", "prompts-padded"])
def test_room_for_the_chunks(name: str) -> None:
    """Each chunk of a step has a number of its own, below how many there is room for."""
    case = CASES[name]
    step, heads = cases.step_of(case), DeltaHeads(1, 2, 128, 128)
    tiles = DeltaTiles.of(torch.empty(case.num_tokens, 4, dtype=torch.bfloat16), heads, step)
    room = len(tiles.factors) // (heads.num_values * FACTORS * CHUNK)
    assert len(tiles.tiles) == room * heads.num_values * TILES * CHUNK
    base, numbers = step.num_short * step.short_len, []
    starts, rows = step.starts.tolist(), step.row_of_token.tolist()
    for first, end in step.chunks.tolist():
        if first < end:
            start, row = starts[rows[first]], rows[first] - step.num_short
            numbers.append((start - base) // CHUNK + row + (first - start) // CHUNK)
    assert numbers
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < room for number in numbers)


@pytest.mark.skipif(cases.DEVICE != "cpu", reason="emulated on a CPU; with a GPU the cases lie there")
@pytest.mark.parametrize("values", [64, 128])
@pytest.mark.parametrize("name", ["mixed", "prompts-padded", "prompts"])
def test_meaning(name: str, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' arithmetic and places, on a CPU; not what depends on the GPU."""
    monkeypatch.setattr(gluon_delta_chunks, "delta_chunk_gluon_kernel", OnCpu(delta_chunk_gluon_kernel))
    monkeypatch.setattr(gluon_delta_scan, "delta_scan_gluon_kernel", OnCpu(delta_scan_gluon_kernel))
    case, heads = CASES[name], DeltaHeads(1, 1, 128, values)
    mixed, norm, gates = inputs(case, heads, torch.float16)
    step = cases.step_of(case)
    states = cases.states(1, values, 128, step=step)
    truth = states.clone()
    exact = replace(norm, gate=norm.gate.float())
    expected = reference.OPS.gated_delta(mixed.float(), heads, gates, exact, truth, step)
    found = run(delta_chunks, (mixed, norm, gates), heads, step, states)
    first = step.num_short * step.short_len
    live = slice(first, case.num_live)
    assert found[first:].isfinite().all()
    torch.testing.assert_close(found[live].float(), expected[live], rtol=5e-3, atol=5e-3)
    slots = [slot for slot in step.slots.tolist()[step.num_short :] if slot >= 0]
    torch.testing.assert_close(states[slots], truth[slots], rtol=5e-3, atol=5e-3)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("of Hopper GPUs alone")


Kernel = Callable[..., None]


def run(kernel: Kernel, given: Inputs, heads: DeltaHeads, step: StateStep, states: torch.Tensor) -> torch.Tensor:
    mixed, norm, gates = given
    out = torch.zeros(len(mixed), heads.num_values * heads.value_dim, dtype=mixed.dtype, device=mixed.device)
    kernel(mixed, heads, gates, norm, states, step, out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [QWEN, DeltaHeads(2, 2, 128, 64)], ids=["128", "64"])
@pytest.mark.parametrize("name", ["prompts", "mixed", "prompts-padded"])
def test_as_in_triton(hopper: None, name: str, heads: DeltaHeads) -> None:
    """Triton's kernels are those of other GPUs."""
    case = CASES[name]
    given, step = inputs(case, heads), cases.step_of(case)
    states = cases.states(heads.num_values, heads.value_dim, heads.key_dim, step=step)
    other = states.clone()
    found = run(delta_chunks, given, heads, step, states)
    expected = run(triton_delta_chunks.delta_chunks, given, heads, step, other)
    live = slice(step.num_short * step.short_len, case.num_live)
    assert (found - expected)[live].abs().max() < 0.03 * expected[live].abs().max()
    torch.testing.assert_close(states, other, rtol=0.03, atol=0.03, equal_nan=True)


@pytest.mark.gpu
def test_beside_what_is_no_number(hopper: None) -> None:
    """A request whose last chunk is short ends where another begins."""
    case = Case([100, 70, 300], [False, True, True])
    (mixed, norm, gates), step = inputs(case, QWEN), cases.step_of(case)
    states = cases.states(4, 128, 128, step=step)
    other, broken = states.clone(), mixed.clone()
    broken[100:170] = float("nan")
    found = run(delta_chunks, (mixed, norm, gates), QWEN, step, states)
    beside = run(delta_chunks, (broken, norm, gates), QWEN, step, other)
    for tokens, row in ((slice(0, 100), 0), (slice(170, 470), 2)):
        assert torch.equal(found[tokens], beside[tokens])
        assert torch.equal(states[step.slots[row]], other[step.slots[row]])


@pytest.mark.gpu
def test_among_many_the_same(hopper: None) -> None:
    """What a request gives does not depend on others, bit by bit."""
    case, alone = Case([70] * 8 + [1000], [True] * 9), Case([1000], [True])
    heads = DeltaHeads(4, 8, 128, 128)
    (mixed, norm, gates), step = inputs(case, heads), cases.step_of(case)
    states = torch.zeros(cases.SLOTS, 8, 128, 128, device=cases.DEVICE)
    own_states = states.clone()
    found = run(delta_chunks, (mixed, norm, gates), heads, step, states)
    part = slice(560, 1560)
    own_gates = replace(gates, a=gates.a[part], b=gates.b[part])
    own = (mixed[part], replace(norm, gate=norm.gate[part]), own_gates)
    assert torch.equal(run(delta_chunks, own, heads, cases.step_of(alone), own_states), found[part])
