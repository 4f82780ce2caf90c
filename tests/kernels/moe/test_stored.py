"""Experts' weights of few bits against what they stand for, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.kernels.gemm import DeferredNorm
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import Form, StoredTiles, bits_of, block_for, exponent_words, groups_first, pack_words
from app.kernels.moe import GLU, ExpertWeights, reference, triton_ops
from app.kernels.moe.stacked import StackedExperts, stack_experts
from app.kernels.moe.stored import serves
from app.kernels.moe.tiles import NARROW, LayerTiles
from app.kernels.moe.triton_grouped import GroupedTile
from app.kernels.moe.triton_stored import plain_experts
from tests.kernels.moe.cases import Case, make_case, true_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHOLE = 1 << 20  # a group that is a row
TILE = GroupedTile(16, 32, 128, 4, 3)
SPLIT = GroupedTile(8, 32, 128, 4, 3, splits=2)
ON_A_GPU = [
    GroupedTile(16, 64, 128, 4, 3, is_wide=True),
    GroupedTile(8, 8, 128, 1, 1, ahead=2),
    GroupedTile(8, 32, 128, 4, 1, ahead=1, splits=2, registers=128),
    GroupedTile(16, 16, 128, 1, 1, ahead=4),
]
MOST_ERRORS = {torch.float16: 4e-3} | ({torch.bfloat16: 2e-2} if DEVICE == "cuda" else {})
# form, group, whether there are offsets, outputs that share a scale
KINDS: list[tuple[Form, int, bool, int]] = [
    ("e2m1", 32, False, 1),
    ("nibble", 128, True, 1),
    ("nibble", 64, False, 1),
    ("e4m3", WHOLE, False, 1),
    ("e4m3", 128, False, 128),
    ("table", 64, False, 1),
    ("int8", WHOLE, False, 1),
]


def stored(shape: tuple[int, int, int], kind: tuple[Form, int, bool, int]) -> StackedExperts:
    """Random experts [E, N, K] whose products with rows of one are about one."""
    form, group, has_offsets, scale_rows = kind
    num_experts, num_rows, size = shape
    group, bits = min(group, size), bits_of(form)
    block, groups = block_for(form, group), (-(-num_rows // scale_rows), -(-size // group))
    typical = {"int8": 74.0, "nibble": 4.6, "e2m1": 3.0, "table": 0.6, "e4m3": 1.0}[form] * size**0.5
    experts = []
    for _ in range(num_experts):
        codes = torch.randint(0, 1 << bits, (num_rows, size), dtype=torch.uint8)
        if form == "e4m3":
            codes = torch.randn(num_rows, size).to(torch.float8_e4m3fn).view(torch.uint8)
        sizes = size, block, group
        scales = groups_first((torch.rand(groups) + 0.5) / typical, *sizes)
        offsets = groups_first(torch.randn(groups) / size**0.5, *sizes) if has_offsets else None
        table = torch.linspace(-1, 1, 16).repeat(num_rows, 1) * torch.rand(num_rows, 1) if form == "table" else None
        words = pack_words(codes, form, block)
        if form == "e2m1":
            scales = exponent_words(torch.exp2(scales.log2().round()))
        tiles = StoredTiles(form, words, scales, offsets, table, *sizes, scale_rows)
        experts.append(GroupWeight(tiles) if table is None else TableWeight(tiles))
    stacked = stack_experts(experts, torch.float16, triton_ops.OPS)
    assert isinstance(stacked, StackedExperts)
    return stacked


def on_device(weight: StackedExperts) -> StackedExperts:
    """The same where kernels run."""
    tiles = weight.packed.tiles
    moved = {name: getattr(tiles, name) for name in ("words", "scales", "offsets", "table")}
    moved = {name: None if t is None else t.to(DEVICE) for name, t in moved.items()}
    return replace(weight, packed=replace(weight.packed, tiles=replace(tiles, **moved)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_experts_of_few_bits(kind: tuple[Form, int, bool, int]) -> None:
    """Widths that blocks do not divide; pairs that go nowhere."""
    plain = make_case(3, 3, 2, 192, 72, routed="padded")
    gate_up, down = stored((3, 144, 192), kind), stored((3, 192, 72), kind)
    numbers = [torch.stack([w.dequantize(e) for e in range(3)]) for w in (gate_up, down)]
    weights = ExpertWeights(on_device(gate_up), on_device(down), GLU())
    tiles = [LayerTiles(TILE, TILE, is_sorted=True)]
    tiles += [LayerTiles(*NARROW, is_sorted=True)] if DEVICE == "cuda" else []
    tiles += [LayerTiles(one, one, is_sorted=False) for one in (SPLIT, *(ON_A_GPU if DEVICE == "cuda" else []))]
    for dtype, most in MOST_ERRORS.items():
        given = plain.to(dtype, DEVICE)
        truth = true_sum(Case(given.x.double().cpu(), plain.routing, ExpertWeights(*numbers, GLU())))
        factor = torch.tensor([0.5, 2.0, 1.0], device=DEVICE)[:, None]
        deferred = DeferredNorm(given.x * factor.to(dtype), (factor**2 * 192 / 4).expand(-1, 4).contiguous(), 1e-9)
        for one in tiles:
            found = triton_ops.experts(deferred, given.routing, weights, one)
            error = (found.materialize().double().cpu() - truth).norm() / truth.norm()
            assert float(error) < most, one
            residual, norm = given.x[:, :1].expand(-1, 192).contiguous(), torch.ones(192, dtype=dtype, device=DEVICE)
            total = found.add_norm(residual, norm, 1e-6, may_defer=True)[1].double().cpu()
            assert float((total - truth - residual.double().cpu()).norm() / truth.norm()) < 2 * most, one
    found = reference.experts(plain.x, plain.routing, ExpertWeights(gate_up, down, GLU()))
    truth = true_sum(Case(plain.x, plain.routing, ExpertWeights(*numbers, GLU())))
    torch.testing.assert_close(found.materialize().double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_unpacked_experts(kind: tuple[Form, int, bool, int]) -> None:
    weight = stored((3, 72, 160), kind)
    assert weight.shape == (3, 72, 160)
    truth = torch.stack([weight.dequantize(expert) for expert in range(3)])
    torch.testing.assert_close(plain_experts(on_device(weight), torch.float32).cpu(), truth)


def test_steps_of_many_rows_unpack_their_weights() -> None:
    plain = make_case(70, 2, 2, 64, 32)
    kind: tuple[Form, int, bool, int] = ("e2m1", 32, False, 1)
    gate_up, down = stored((2, 64, 64), kind), stored((2, 64, 32), kind)
    given = plain.to(torch.float16, DEVICE)
    numbers = [torch.stack([w.dequantize(e) for e in range(2)]) for w in (gate_up, down)]
    truth = true_sum(Case(given.x.double().cpu(), plain.routing, ExpertWeights(*numbers, GLU())))
    weights = ExpertWeights(on_device(gate_up), on_device(down), GLU())
    found = triton_ops.experts(given.x, given.routing, weights, LayerTiles(TILE, TILE, is_sorted=True, unpacks=True))
    assert float((found.materialize().double().cpu() - truth).norm() / truth.norm()) < 4e-3


def test_what_no_kernel_reads_is_dequantized_when_it_is_loaded() -> None:
    """Columns in an order of the expert's own."""
    q, scale = torch.randint(0, 16, (8, 64), dtype=torch.uint8), torch.rand(8, 2)
    ordered = [GroupWeight.of(q, scale, None, 4, torch.randperm(64), torch.float16) for _ in range(2)]
    made = stack_experts(ordered, torch.float16, triton_ops.OPS)
    assert isinstance(made, torch.Tensor)
    torch.testing.assert_close(made[1], ordered[1].dequantize().half())
    made = stack_experts([replace(one, order=None) for one in ordered], torch.float16, triton_ops.OPS)
    assert isinstance(made, StackedExperts)
    assert serves(made)
