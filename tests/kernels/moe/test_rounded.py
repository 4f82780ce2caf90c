"""Experts' products in which both sides are e4m3 against float64 of what is left of both after rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.kernels.float8 import widened
from app.kernels.gemm.fp8_block import Fp8BlockWeight, Fp8OnlyWeight, quantize_groups
from app.kernels.gemm.triton_quantize import quantize
from app.kernels.moe import GLU, ExpertWeights, Routing, triton_ops
from app.kernels.moe.stacked import StackedExperts, stack_experts
from app.kernels.moe.stored import fp8_tiles
from app.kernels.moe.tiles import FP8, FP8_ANY, FP8_ROWS, Fp8LayerTiles, fp8_layer_tiles
from app.kernels.moe.triton_fp8 import Fp8Product, Fp8Tile, RoundedRows, down_product, gate_up_product
from app.kernels.moe.triton_sort import sort_pairs
from tests.kernels.moe.cases import GLUS, true_glu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 128
SMALL = Fp8LayerTiles(Fp8Tile(16, 4, 3), Fp8Tile(16, 4, 3, programs=1))
# Of a product whose both sides are given as rounded: its sums, of which a Hopper's tensor cores keep some 14 bits, and
# its result's type.
MOST_ERRORS = {torch.float16: 2e-3, torch.bfloat16: 4e-3}
# Of both: a number of h that is near the middle between two of e4m3, a sixteenth to an eighth apart, may become either.
# An error of 1e-3 before takes some percent of the numbers over it.
MOST_LAYER_ERROR = 2e-2
DTYPES = [torch.float16] if DEVICE == "cpu" else [torch.bfloat16, torch.float16]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as e4m3 leaves it, a scale for each 128 columns, in float64."""
    numbers, scales = quantize_groups(x.float(), BLOCK)
    return (widened(numbers, torch.float32) * scales.repeat_interleave(BLOCK, 1)).double()


def make_weights(
    num_experts: int, intermediate: int, hidden: int, activation: GLU, *, has_bias: bool = False,
    weighs_input: bool = False,
) -> ExpertWeights:  # fmt: skip
    """Random experts on a CPU whose products with rows of one are about one."""

    def stacked(num_rows: int, size: int) -> StackedExperts:
        scale = (-(-num_rows // BLOCK), -(-size // BLOCK))
        experts = [
            Fp8BlockWeight.of(
                torch.randn(num_rows, size).to(torch.float8_e4m3fn), (torch.rand(scale) + 0.5) / size**0.5, (BLOCK,) * 2
            )
            for _ in range(num_experts)
        ]
        made = stack_experts(experts, torch.float16, triton_ops.OPS)
        assert isinstance(made, StackedExperts)
        return made

    biases = torch.randn(num_experts, 2 * intermediate), torch.randn(num_experts, hidden)
    gate_up, down = stacked(2 * intermediate, hidden), stacked(hidden, intermediate)
    return ExpertWeights(gate_up, down, activation, *(biases if has_bias else (None, None)), weighs_input=weighs_input)


def on_device(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The same where kernels run."""

    def moved(weight: torch.Tensor | object) -> StackedExperts:
        assert isinstance(weight, StackedExperts)
        packed = weight.packed
        tiles = replace(packed.tiles, words=packed.tiles.words.to(DEVICE), scales=packed.tiles.scales.to(DEVICE))
        return replace(weight, packed=replace(packed, tiles=tiles, scales=packed.scales.to(DEVICE)))

    biases = (None if b is None else b.to(DEVICE, dtype) for b in (weights.gate_up_bias, weights.down_bias))
    names = ("gate_up_bias", "down_bias")
    return replace(
        weights, gate_up=moved(weights.gate_up), down=moved(weights.down), **dict(zip(names, biases, strict=True))
    )


def true_sum(x: torch.Tensor, routing: Routing, weights: ExpertWeights, dtype: torch.dtype) -> torch.Tensor:
    """float64 [T, C]; biases are rounded to `dtype`."""
    total, rows = torch.zeros(x.shape, dtype=torch.float64), rounded(x)
    biases = [None if b is None else b.to(dtype).double() for b in (weights.gate_up_bias, weights.down_bias)]
    size = weights.down.shape[2]
    assert isinstance(weights.gate_up, StackedExperts)
    assert isinstance(weights.down, StackedExperts)
    for expert in range(weights.down.shape[0]):
        gate_up, down = weights.gate_up.dequantize(expert).double(), weights.down.dequantize(expert).double()
        for t, k in (routing.ids == expert).nonzero().tolist():
            weight = float(routing.weights[t, k])
            h = gate_up @ rows[t] * (weight if weights.weighs_input else 1.0)
            h = h if biases[0] is None else h + biases[0][expert]
            y = down @ rounded(true_glu(h[:size], h[size:], weights.activation)[None])[0]
            y = y if biases[1] is None else y + biases[1][expert]
            total[t] += y if weights.weighs_input else y * weight
    return total


def check(
    sizes: tuple[int, int, int, int, int], tiles: Fp8LayerTiles, activation: GLU, *, has_bias: bool = False,
    weighs_input: bool = False,
) -> None:  # fmt: skip
    """Some pairs go nowhere; sizes: T, E, K, I, C."""
    torch.manual_seed(sum(sizes))
    num_tokens, num_experts, top, intermediate, hidden = sizes
    weights = make_weights(num_experts, intermediate, hidden, activation, has_bias=has_bias, weighs_input=weighs_input)
    ids = torch.stack([torch.randperm(num_experts)[:top] for _ in range(num_tokens)]).int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    routing = Routing(ids, torch.rand(num_tokens, top) + 0.5)
    for dtype in DTYPES:
        x = torch.randn(num_tokens, hidden).to(dtype)
        x[0] = 0.0
        truth = true_sum(x, routing, weights, dtype)
        given = Routing(*(t.to(DEVICE) for t in routing))
        found = triton_ops.experts(x.to(DEVICE), given, on_device(weights, dtype), tiles).materialize().double().cpu()
        error = (found - truth).norm() / truth.norm()
        assert float(error) < MOST_LAYER_ERROR, error


def check_products(sizes: tuple[int, int, int, int, int], tiles: Fp8LayerTiles) -> None:
    """Each product by itself; sizes: T, E, K, I, C."""
    torch.manual_seed(sum(sizes))
    num_tokens, num_experts, top, intermediate, hidden = sizes
    weights = make_weights(num_experts, intermediate, hidden, GLU())
    moved = on_device(weights, torch.float16)
    gate_up, down = fp8_tiles(moved.gate_up), fp8_tiles(moved.down)
    assert gate_up is not None
    assert down is not None
    ids = torch.stack([torch.randperm(num_experts)[:top] for _ in range(num_tokens)]).int()
    pairs = sort_pairs(ids.to(DEVICE), num_experts, tiles.gate_up.rows)
    order, x = pairs.order.cpu().long(), torch.randn(num_tokens, hidden).half()
    rows = RoundedRows(*quantize(x.to(DEVICE), "e4m3", by_blocks=True))
    h = gate_up_product(Fp8Product(gate_up, None, GLU()), rows, pairs, top, tiles.gate_up)
    scales = h.scales.cpu().double().repeat_interleave(BLOCK, 1)
    halves = widened(h.rows.cpu(), torch.float32).double().view(len(order), -1, BLOCK // 2, 2)
    found_h = halves.transpose(2, 3).flatten(1) * scales
    outs = {dtype: down_product(Fp8Product(down, None), h, pairs, tiles.down, dtype).double().cpu() for dtype in DTYPES}
    assert isinstance(weights.gate_up, StackedExperts)
    assert isinstance(weights.down, StackedExperts)
    for expert in range(num_experts):
        places = (ids.flatten()[order] == expert).nonzero()[:, 0]
        both = rounded(x)[order[places] // top] @ weights.gate_up.dequantize(expert).double().t()
        true_h = true_glu(both[:, :intermediate], both[:, intermediate:], GLU())
        # e4m3 has three bits behind the first, and below the smallest normal number steps of 2^-9.
        step = torch.maximum(true_h.abs() / 16, scales[places] / 1024)
        assert bool(((found_h[places] - true_h).abs() <= step + 2e-3 * 448 * scales[places]).all())
        true_rows = found_h[places] @ weights.down.dequantize(expert).double().t()
        for dtype, out in outs.items():
            assert float((out[order[places]] - true_rows).norm() / true_rows.norm()) < MOST_ERRORS[dtype]


@pytest.mark.usefixtures("rounding_e4m3")
def test_each_product() -> None:
    check_products((20, 3, 2, 128, 384), SMALL)


@pytest.mark.usefixtures("rounding_e4m3")
@pytest.mark.parametrize("sizes", [(20, 3, 2, 128, 384), (5, 4, 3, 256, 128)], ids=str)
def test_sums(sizes: tuple[int, int, int, int, int]) -> None:
    """An odd number of blocks of outputs; experts without pairs."""
    check(sizes, SMALL, GLU())


@pytest.mark.usefixtures("rounding_e4m3")
@pytest.mark.parametrize("activation", [name for name, glu in GLUS.items() if name != "silu" and glu.has_gate])
def test_activations_and_biases(activation: str) -> None:
    check((7, 2, 2, 128, 128), SMALL, GLUS[activation], has_bias=True)
    check((7, 2, 2, 128, 128), SMALL, GLUS[activation], has_bias=True, weighs_input=True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tiles", [FP8, FP8_ANY], ids=["gluon", "triton"])
def test_tiles_in_use(tiles: Fp8LayerTiles) -> None:
    """Tiles with rows for one group of warps, for both, and one after another for a program."""
    check_products((300, 3, 2, 256, 384), tiles)
    check_products((1500, 6, 2, 384, 2048), tiles)
    check((300, 3, 2, 256, 384), tiles, GLU())
    check((700, 2, 1, 384, 640), tiles, GLUS["clamped"], has_bias=True, weighs_input=True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_steps_of_many_rows_round_them() -> None:
    many, few = torch.zeros(FP8_ROWS, 8, dtype=torch.int32), torch.zeros(FP8_ROWS - 1, 8, dtype=torch.int32)
    for ids, is_rounded in ((many, True), (few, False)):
        assert (fp8_layer_tiles(ids.to(DEVICE), 8, GLU(), torch.bfloat16) is not None) == is_rounded
        assert fp8_layer_tiles(ids.to(DEVICE), 8, GLU(), torch.float32) is None


def test_which_experts_round_activations() -> None:
    codes, scale = torch.ones(128, 256).to(torch.float8_e4m3fn), torch.ones(1, 2)

    def stacked(kind: type[Fp8BlockWeight] | type[Fp8OnlyWeight], rows: int, block: tuple[int, int]) -> StackedExperts:
        scales = scale.expand(-(-rows // block[0]), -1) if block[1] == BLOCK else torch.ones(rows // block[0], 4)
        made = stack_experts([kind.of(codes[:rows], scales, block)] * 2, torch.float16, triton_ops.OPS)
        assert isinstance(made, StackedExperts)
        return made

    assert fp8_tiles(stacked(Fp8BlockWeight, 128, (128, 128))) is not None
    assert fp8_tiles(stacked(Fp8OnlyWeight, 128, (128, 128))) is None
    assert fp8_tiles(stacked(Fp8BlockWeight, 64, (128, 128))) is None
    assert fp8_tiles(stacked(Fp8BlockWeight, 128, (64, 64))) is None
    assert fp8_tiles(torch.zeros(2, 128, 256)) is None
