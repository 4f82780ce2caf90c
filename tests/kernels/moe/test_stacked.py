"""Packed weights of experts become one, or plain tensors where kernels could not read them so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.parts import UnpackedWeight
from app.kernels.moe import ExpertWeights, Routing
from app.kernels.moe.reference import OPS
from app.kernels.moe.stacked import StackedExperts, stack_experts


@dataclass(frozen=True)
class Codes:
    numbers: torch.Tensor  # int8 [N, K]
    offset: int


@dataclass(frozen=True)
class Scaled:
    """Tensors in a dataclass of its own, in a tuple, and none at all."""

    codes: Codes
    scales: tuple[torch.Tensor, torch.Tensor]  # [N, 1], []
    order: torch.Tensor | None = None

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.dequantize(), bias)

    def dequantize(self) -> torch.Tensor:
        return (self.codes.numbers.float() - self.codes.offset) * self.scales[0] * self.scales[1]


def weights(count: int, n: int, k: int, offset: int = 3) -> list[Any]:
    codes = [Codes(torch.randint(-8, 8, (n, k), dtype=torch.int8), offset) for _ in range(count)]
    return [Scaled(one, (torch.rand(n, 1), torch.rand(()))) for one in codes]


def test_each_expert_is_what_it_was() -> None:
    each = weights(5, 6, 4)
    stacked = stack_experts(each, torch.float32, OPS)
    assert isinstance(stacked, StackedExperts)
    assert stacked.shape == (5, 6, 4)
    assert [tuple(x.shape) for x in stacked.tensors] == [(5, 6, 4), (5, 6, 1), (5,)]
    for expert, one in enumerate(each):
        assert torch.equal(stacked.dequantize(expert), one.dequantize())


def in_groups(scale: torch.Tensor, zero: float | None) -> GroupWeight:
    """Random 4 bits [6, 128] with a scale for 64 inputs each."""
    q = torch.randint(0, 16, (6, 128), dtype=torch.uint8)
    return GroupWeight.of(q, scale, None if zero is None else -zero * scale, 4, None, torch.float32)


@pytest.mark.parametrize("zeros", [(8, 7, None), (None, 3, 3), (8, None, 8)])
def test_experts_whose_numbers_are_stored_unlike_are_stacked(zeros: tuple[float | None, ...]) -> None:
    """Scales that fit 16 bits, zeros in the middle: an expert may happen to have nothing else."""
    exact, other = torch.full((6, 2), 0.25), torch.rand(6, 2) + 0.1
    each = [in_groups(scale, zero) for scale, zero in zip((exact, other, exact), zeros, strict=True)]
    assert len({one.tiles.scales.dtype for one in each}) == 2
    assert len({one.tiles.offsets is None for one in each}) == (1 if zeros == (8, None, 8) else 2)
    stacked = stack_experts(each, torch.float32, replace(OPS, serves=lambda _: True))
    assert isinstance(stacked, StackedExperts)
    for expert, one in enumerate(each):
        assert torch.equal(stacked.dequantize(expert), one.dequantize())


@pytest.mark.parametrize("kind", ["unlike numbers", "unlike sizes of scales", "no kernel", "plain"])
def test_what_no_kernel_reads_is_dequantized(kind: str) -> None:
    each, ops = weights(3, 6, 4), OPS
    if kind == "unlike numbers":
        each = [*each[:2], *weights(1, 6, 4, offset=1)]
    elif kind == "unlike sizes of scales":
        each[1] = replace(each[1], scales=(torch.rand(1, 1), torch.rand(())))
    elif kind == "no kernel":
        ops = replace(OPS, serves=lambda _: False)
    else:
        each = [UnpackedWeight(one.dequantize().bfloat16()) for one in each]
    stacked = stack_experts(each, torch.bfloat16, ops)
    assert isinstance(stacked, torch.Tensor)
    assert stacked.dtype == torch.bfloat16
    assert torch.equal(stacked, torch.stack([one.dequantize().bfloat16() for one in each]))


def test_the_layer_computes_with_them() -> None:
    gate_up, down, x = weights(4, 12, 8), weights(4, 8, 6), torch.randn(5, 8)
    routing = Routing(torch.tensor([[0, 3], [1, -1], [2, 0], [-1, -1], [3, 1]], dtype=torch.int32), torch.rand(5, 2))
    packed = ExpertWeights(*(stack_experts(one, torch.float32, OPS) for one in (gate_up, down)))
    plain = ExpertWeights(*(torch.stack([each.dequantize() for each in one]) for one in (gate_up, down)))
    found, expected = (OPS.experts(x, routing, one).materialize() for one in (packed, plain))
    torch.testing.assert_close(found, expected)
