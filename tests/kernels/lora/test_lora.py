"""Low-rank products against float64, token by token."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import DeferredNorm, Inputs, LinearOps, materialize, triton_small
from app.kernels.gemm import reference as plain_products
from app.kernels.lora import (
    NO_SLOT,
    TILE_RANK,
    AdaptedWeight,
    LoraOps,
    SlotChanges,
    SlotMatrices,
    reference,
    triton_ops,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
OPS = {"torch": reference.OPS, "triton": triton_ops.OPS}
LINEAR: dict[str, LinearOps[torch.Tensor]] = {"torch": plain_products.OPS, "triton": triton_small.OPS}


def matrices(
    ops: LoraOps, size: int, parts: tuple[int, ...], ranks: list[int], tiles: int, dtype: torch.dtype
) -> SlotMatrices:
    """Slots whose adapters have `ranks`; what lies behind them is NaN, which nobody may read."""
    slots, outputs = len(ranks), sum(parts)
    a_size = len(parts) * TILE_RANK * size
    pool = torch.full((slots, tiles, a_size + outputs * TILE_RANK), torch.nan, dtype=dtype, device=DEVICE)
    first = pool[:, :, :a_size].unflatten(2, (len(parts), TILE_RANK, size))
    second = pool[:, :, a_size:].unflatten(2, (outputs, TILE_RANK))
    used = [-(-rank // TILE_RANK) for rank in ranks]
    for slot, (rank, count) in enumerate(zip(ranks, used, strict=True)):
        whole = torch.zeros(count * TILE_RANK, len(parts), size)
        whole[:rank] = torch.randn(rank, len(parts), size) / size**0.5
        first[slot, :count] = whole.view(count, TILE_RANK, len(parts), size).transpose(1, 2).to(dtype).to(DEVICE)
        back = torch.zeros(outputs, count * TILE_RANK)
        back[:, :rank] = torch.randn(outputs, rank) / max(1, rank) ** 0.5
        second[slot, :count] = back.view(outputs, count, TILE_RANK).transpose(0, 1).to(dtype).to(DEVICE)
    num_tiles = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    return SlotMatrices(first, second, num_tiles, parts, ops.part_tiles(parts, torch.device(DEVICE)))


def truth(x: torch.Tensor, made: SlotMatrices, slots: list[int], y: torch.Tensor) -> torch.Tensor:
    out = y.double().clone()
    for token, slot in enumerate(slots):
        start = 0
        for part, size in enumerate(made.part_sizes):
            for tile in range(int(made.num_tiles[slot]) if slot != NO_SLOT else 0):
                hidden = made.first[slot, tile, part].double() @ x[token].double()
                out[token, start : start + size] += made.second[slot, tile, start : start + size].double() @ hidden
            start += size
    return out


def slots_of(num_tokens: int, num_slots: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(-1, num_slots) for _ in range(num_tokens)]


CASES = [
    # tokens, inputs, outputs of the parts, ranks of the slots' adapters, tiles
    (1, 64, (64,), [4], 1),
    (5, 64, (64, 32, 32), [4, 16, 0], 1),
    (33, 112, (64,), [8, 3], 2),
    (20, 40, (48, 200), [32, 17, 1], 2),
    (70, 1024, (130,), [16], 1),
    (300, 64, (40, 24), [5, 40], 3),
]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("case", "dtype"), list(itertools.product(range(len(CASES)), DTYPES)))
def test_products_are_those_of_each_tokens_slot(name: str, case: int, dtype: torch.dtype) -> None:
    tokens, size, parts, ranks, tiles = CASES[case]
    torch.manual_seed(case)
    ops, slots = OPS[name], slots_of(tokens, len(ranks), case)
    made = matrices(ops, size, parts, ranks, tiles, dtype)
    x, y = (torch.randn(tokens, width).to(DEVICE, dtype) for width in (size, sum(parts)))
    rows = ops.rows_by_slot(torch.tensor(slots, dtype=torch.int32, device=DEVICE), made.num_tiles, tiles)
    before, expected = y.clone(), truth(x, made, slots, y)
    out = ops.add_products(x, made, rows, y, in_place=False)
    assert torch.equal(y, before), "y was to stay"
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    base = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(out[base], y[base]), "tokens without an adapter have the same bits"
    assert ops.add_products(x, made, rows, y, in_place=True) is y
    assert torch.equal(y, out)


@pytest.mark.parametrize("name", OPS)
def test_a_deferred_norm_is_divided(name: str) -> None:
    ops, size = OPS[name], 64
    made = matrices(ops, size, (48,), [16, 16], 1, torch.float32)
    slots = [0, -1, 1, 1]
    rows = ops.rows_by_slot(torch.tensor(slots, dtype=torch.int32, device=DEVICE), made.num_tiles, 1)
    y = torch.zeros(4, 48, device=DEVICE)
    raw = torch.randn(4, size, device=DEVICE) * 3
    deferred: Inputs = DeferredNorm(raw, raw.square().unflatten(1, (4, -1)).sum(2), 1e-5)
    out = ops.add_products(deferred, made, rows, y, in_place=False)
    expected = truth(deferred.materialize(), made, slots, y)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
def test_a_token_has_the_same_bits_beside_others(name: str) -> None:
    """In the order of any neighbours (I6); as many tokens, for which the base product, too, is the same."""
    ops, size, tokens = OPS[name], 512, 24
    made = matrices(ops, size, (96,), [16, 8, 16], 1, torch.float32)
    torch.manual_seed(3)
    x, y = torch.randn(tokens, size, device=DEVICE), torch.randn(tokens, 96, device=DEVICE)
    found = []
    for others in (0, 2):
        slots = torch.full((tokens,), others, dtype=torch.int32, device=DEVICE)
        slots[7] = 1
        found.append(ops.add_products(x, made, ops.rows_by_slot(slots, made.num_tiles, 1), y, in_place=False)[7])
    assert torch.equal(*found)


def inputs(tokens: int, size: int, dtype: torch.dtype, *, is_deferred: bool) -> Inputs:
    raw = torch.randn(tokens, size).to(DEVICE, dtype)
    return DeferredNorm(raw, raw.float().square().unflatten(1, (4, -1)).sum(2), 1e-5) if is_deferred else raw


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("tokens", "ranks", "tiles"), [(1, [5], 1), (20, [16, 3, 0, 9], 1), (37, [40, 16], 3), (70, [12], 1)]
)
@pytest.mark.parametrize("is_deferred", [True, False])
def test_products_with_what_follows_them(
    name: str, tokens: int, ranks: list[int], tiles: int, is_deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the base product adds them itself or not: those of the weight that each token's adapter makes."""
    ops, plain, size, columns = OPS[name], LINEAR[name], 256, 128
    halves: list[int] = []
    shrink_few = triton_ops.shrink_few
    monkeypatch.setattr(triton_ops, "shrink_few", lambda *given: halves.append(1) or shrink_few(*given))
    torch.manual_seed(tokens)
    slots = slots_of(tokens, len(ranks), tokens)
    base = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    num_tiles = torch.tensor([-(-rank // TILE_RANK) for rank in ranks], dtype=torch.int32, device=DEVICE)
    rows = ops.rows_by_slot(torch.tensor(slots, dtype=torch.int32, device=DEVICE), num_tiles, tiles)
    x = inputs(tokens, size, DTYPES[-1], is_deferred=is_deferred)
    residual, norm = (torch.randn(*shape).to(DEVICE, DTYPES[-1]) for shape in ((tokens, columns), (columns,)))

    def over(*parts: int) -> tuple[AdaptedWeight, torch.Tensor, torch.Tensor]:
        made = matrices(ops, size, parts, ranks, tiles, DTYPES[-1])
        weight = (torch.randn(sum(parts), size) / size**0.5).to(DEVICE, DTYPES[-1])
        bias = torch.randn(sum(parts)).to(DEVICE, DTYPES[-1])
        product = materialize(x).double() @ weight.double().T + bias.double()
        return AdaptedWeight(plain, weight, made, rows), bias, truth(materialize(x), made, slots, product)

    def close(own: torch.Tensor, expected: torch.Tensor, bare: torch.Tensor) -> None:
        assert (own.double() - expected).abs().max() < TOLERANCE[DTYPES[-1]] * max(1.0, float(expected.abs().max()))
        # On a GPU the plain products with adapters have their activation from a kernel, those without from PyTorch.
        is_exact = name == "triton" or DEVICE == "cpu"
        assert not is_exact or torch.equal(own[base], bare[base]), "tokens without an adapter have the same bits"

    weight, bias, expected = over(columns, 64)
    close(ops.linear.linear(x, weight, bias), expected, plain.linear(x, weight.weight, bias))
    weight, bias, expected = over(columns, columns)
    own, bare = (
        materialize(made.gated_linear(x, one, bias, "silu"))
        for made, one in ((ops.linear, weight), (plain, weight.weight))
    )
    gate, up = expected.to(DTYPES[-1]).double().chunk(2, dim=1)
    close(own, F.silu(gate) * up, bare if tokens <= 16 or name == "torch" else own)
    weight, bias, expected = over(columns)
    rest = materialize(x), bias, residual, norm, 1e-5, False
    own, total = ops.linear.linear_add_norm(rest[0], weight, *rest[1:])
    bare, bare_total = plain.linear_add_norm(rest[0], weight.weight, *rest[1:])
    close(total, expected + residual.double(), bare_total)
    close(materialize(own), F.rms_norm(expected + residual, (columns,), norm.double(), 1e-5), materialize(bare))
    added = {1: (3, 2), 20: (3, 1), 37: (3, 2), 70: (0, 0)}[tokens][not is_deferred]
    assert len(halves) == (added if name == "triton" else 0), "what the base product adds itself"


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("tokens", "dtype"), [(5, DTYPES[0]), (70, DTYPES[-1])])
def test_rows_that_are_looked_up(name: str, tokens: int, dtype: torch.dtype) -> None:
    """An embedding's: each token chooses an input, or none of this rank's."""
    torch.manual_seed(tokens)
    ops, size, outputs, ranks = OPS[name], 90, 72, [16, 3, 20]
    made, slots = matrices(ops, size, (outputs,), ranks, 2, dtype), slots_of(tokens, len(ranks), tokens)
    chosen = random.Random(tokens)
    inputs = [chosen.randrange(-1, size) for _ in range(tokens)]
    x = torch.zeros(tokens, size)
    for token, own in enumerate(inputs):
        x[token, max(own, 0)] = float(own >= 0)
    rows = ops.rows_by_slot(torch.tensor(slots, dtype=torch.int32, device=DEVICE), made.num_tiles, 2)
    y = torch.randn(tokens, outputs).to(DEVICE, dtype)
    expected, before = truth(x.to(DEVICE), made, slots, y), y.clone()
    out = ops.add_looked_up(torch.tensor(inputs, device=DEVICE), made, rows, y)
    assert out is y
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    base = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(out[base], before[base]), "tokens without an adapter have the same bits"


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("tokens", "size", "dtype"), [(3, 1500, DTYPES[0]), (40, 72, DTYPES[-1])])
def test_factors_and_shifts(name: str, tokens: int, size: int, dtype: torch.dtype) -> None:
    """Of the first columns alone, by the slot of each token; others keep their bits."""
    torch.manual_seed(size)
    ops, slots, width = OPS[name], slots_of(tokens, 3, size), size + 8
    whole = torch.randn(3, 2, size + 5, device=DEVICE)
    changes = SlotChanges(whole[:, 0, 5:], whole[:, 1, 5:])
    num_tiles = torch.ones(3, dtype=torch.int32, device=DEVICE)
    rows = ops.rows_by_slot(torch.tensor(slots, dtype=torch.int32, device=DEVICE), num_tiles, 1)
    y = torch.randn(tokens, width).to(DEVICE, dtype)
    expected = y.double().clone()
    for token, slot in enumerate(slots):
        if slot != NO_SLOT:
            own = expected[token, :size] * changes.factors[slot].double()
            expected[token, :size] = own + changes.shifts[slot].double()
    before = y.clone()
    assert ops.change(y, changes, rows) is y
    assert (y.double() - expected).abs().max() < TOLERANCE[dtype] * float(expected.abs().max())
    base = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(y[base], before[base])
    assert torch.equal(y[:, size:], before[:, size:])


@pytest.mark.parametrize("name", OPS)
def test_changes_come_before_what_follows_a_product(name: str) -> None:
    ops, plain, size, columns = OPS[name], LINEAR[name], 256, 128
    torch.manual_seed(2)
    slots, dtype = [0, NO_SLOT, 1, 1, NO_SLOT], torch.float32
    made = matrices(ops, size, (columns,), [16, 5], 1, dtype)
    factors, shifts = (torch.randn(2, columns, device=DEVICE) for _ in range(2))
    made = replace(made, changes=SlotChanges(factors, shifts))
    rows = ops.rows_by_slot(torch.tensor(slots, dtype=torch.int32, device=DEVICE), made.num_tiles, 1)
    weight, bias = (torch.randn(columns, size) / size**0.5).to(DEVICE), torch.randn(columns, device=DEVICE)
    x, residual, norm = (torch.randn(*shape, device=DEVICE) for shape in ((5, size), (5, columns), (columns,)))
    expected = truth(x, made, slots, x.double() @ weight.double().T + bias.double())
    for token, slot in enumerate(slots):
        if slot != NO_SLOT:
            expected[token] = expected[token] * factors[slot].double() + shifts[slot].double()
    adapted = AdaptedWeight(plain, weight, made, rows)
    assert torch.allclose(ops.changed.linear(x, adapted, bias).double(), expected, atol=1e-4)
    normed, total = ops.changed.linear_add_norm(x, adapted, bias, residual, norm, 1e-5, False)
    assert torch.allclose(total.double(), expected + residual.double(), atol=1e-4)
    judge = F.rms_norm(expected + residual.double(), (columns,), norm.double(), 1e-5)
    assert torch.allclose(materialize(normed).double(), judge, atol=1e-4)
    bare, _ = plain.linear_add_norm(x, weight, bias, residual, norm, 1e-5, False)
    base = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.allclose(materialize(normed)[base], materialize(bare)[base], atol=1e-5)
    gate, up = expected.chunk(2, dim=1)
    gated = materialize(ops.changed.gated_linear(x, adapted, bias, "silu"))
    assert torch.allclose(gated.double(), F.silu(gate) * up, atol=1e-4)


def test_tokens_are_sorted_into_chunks() -> None:
    slots = slots_of(150, 5, 1)
    num_tiles = torch.tensor([2, 1, 0, 3, 1], dtype=torch.int32, device=DEVICE)
    made = triton_ops.rows_by_slot(torch.tensor(slots, dtype=torch.int32, device=DEVICE), num_tiles, 3)
    order = made.order.tolist()
    assert order == sorted(range(150), key=lambda token: slots[token])
    covered = []
    for slot, first, count in made.chunks.T.tolist():
        assert 0 <= count <= made.chunk_size
        assert {slots[token] for token in order[first : first + count]} <= {slot}
        covered += order[first : first + count]
    assert covered == order
    jobs, num_jobs = made.jobs[:-1].view(2, -1).T.tolist(), int(made.jobs[-1])
    assert jobs[:num_jobs] == [[slot, tile] for slot in range(5) for tile in range(int(num_tiles[slot]))]
    assert {slot for slot, _ in jobs[num_jobs:]} == {NO_SLOT}
