"""The grouped products of many rows for Hopper against float64. The interpreter cannot run Gluon: on a GPU only."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from app.kernels.kernel_table import HOPPER
from app.kernels.moe import GLU, ExpertWeights, triton_ops
from app.kernels.moe.tiles import WIDE, WIDE_ROWS, tiles_for
from tests.kernels.moe.cases import GLUS, make_case
from tests.kernels.moe.test_triton_ops import check
from tests.kernels.stub_gpu import as_on

ON_GPU = torch.cuda.is_available()
ON_HOPPER = ON_GPU and HOPPER.are_met(torch.device("cuda", 0))
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "routed"),
    [
        ((300, 3, 2, 256, 128), "random"),  # tiles with rows for one group of warps, and for both
        ((1500, 6, 2, 2048, 64), "padded"),  # several tiles one after another for a program
        ((1500, 6, 2, 64, 1024), "padded"),
        ((700, 5, 1, 192, 320), "one"),  # columns that tiles do not divide; experts without pairs
        ((65, 2, 2, 64, 64), "random"),  # one stage of inputs
        ((900, 4, 3, 448, 576), "padded"),
    ],
)
def test_experts(sizes: tuple[int, int, int, int, int], routed: str, dtype: torch.dtype) -> None:
    check(make_case(*sizes, routed=routed), WIDE, dtype)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("activation", ["silu", "clamped"])
def test_biases_and_limits(activation: str, weighs_input: bool) -> None:
    case = make_case(500, 3, 2, 192, 192, GLUS[activation], has_bias=True, weighs_input=weighs_input)
    check(case, WIDE, torch.bfloat16)


@pytest.mark.gpu
@on_hopper
def test_the_same_bits_again_and_again() -> None:
    """Programs take tiles in turn, rings of stages go round: what was not waited for would differ."""
    given = make_case(5000, 16, 4, 1024, 512, routed="padded").to(torch.bfloat16, "cuda")
    first = triton_ops.experts(given.x, given.routing, given.weights, WIDE).materialize()
    for _ in range(200):
        assert torch.equal(triton_ops.experts(given.x, given.routing, given.weights, WIDE).materialize(), first)


@pytest.mark.parametrize(
    ("hidden", "function", "serves"), [(64, "silu", True), (72, "silu", False), (64, "gelu", False)]
)
def test_chosen_for_many_pairs(hidden: int, function: Literal["silu", "gelu"], serves: bool) -> None:
    """On a Hopper alone, and in 16 bits."""
    weights = ExpertWeights(torch.empty(16, 256, hidden), torch.empty(16, hidden, 128), GLU(function))
    many, few = (torch.empty(pairs, 1, dtype=torch.int32) for pairs in (WIDE_ROWS * 16, WIDE_ROWS * 16 - 1))
    with as_on(9):
        assert (tiles_for(many, weights, torch.bfloat16) is WIDE) == serves
        assert tiles_for(few, weights, torch.bfloat16) is not WIDE
        assert tiles_for(many, weights, torch.float32) is not WIDE
    for generation in (0, 8, 10):
        with as_on(generation):
            assert tiles_for(many, weights, torch.bfloat16) is not WIDE
