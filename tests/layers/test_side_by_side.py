"""Columns of several products: split wherever products end, and whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.kernels.gemm import DeferredNorm
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.parts import PackedParts, UnpackedWeight
from app.layers.context import BuildContext
from app.layers.delta import Delta
from app.layers.linear import ColumnLinear
from app.layers.side_by_side import SideBySide
from app.worker.attention.backend import select_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, FP8_ROWS, PLAIN_ROWS = 512, 256, 64


@pytest.mark.parametrize("of_products", [(12,), (7, 5), (3, 1, 8)])
@pytest.mark.parametrize("widths", [(12,), (7, 5), (4, 4, 4), (1, 2, 9)])
def test_columns_are_those_of_all_products(of_products: tuple[int, ...], widths: tuple[int, ...]) -> None:
    whole = torch.arange(36).view(3, 12)
    both = SideBySide(torch.split(whole, list(of_products), dim=1))
    assert len(both) == 3
    assert torch.equal(both.whole(), whole)
    for found, expected in zip(both.split(widths), torch.split(whole, list(widths), dim=1), strict=True):
        assert torch.equal(found, expected)


def test_columns_of_one_product_are_not_copied() -> None:
    first, second = torch.zeros(2, 6), torch.zeros(2, 2)
    found = SideBySide((first, second)).split((2, 4, 2))
    assert [part.untyped_storage().data_ptr() for part in found] == [
        one.untyped_storage().data_ptr() for one in (first, first, second)
    ]


@pytest.mark.parametrize("num_rows", [1, 8, 200])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_blocks_of_fp8_beside_plain_rows(num_rows: int, is_deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each by its own kernel, which divides by a norm itself where rows are few."""
    torch.manual_seed(0)
    kernels = select_attention("triton" if DEVICE.type == "cuda" else "torch", DEVICE)[0]
    groups = ParallelGroups(tp=RankGroup(0, 1, cast("Any", None)))
    with DEVICE:
        layer = ColumnLinear(BuildContext(torch.bfloat16, DEVICE, 64, kernels, groups), SIZE, 320, bias=False)
        codes = torch.randn(FP8_ROWS, SIZE).to(torch.float8_e4m3fn)
        scale, plain = torch.rand(2, 4) / 16 + 0.01, (torch.randn(PLAIN_ROWS, SIZE) / 16).bfloat16()
        rows = torch.randn(num_rows, SIZE).bfloat16()
    x = DeferredNorm(rows, rows.float().square().sum(1, keepdim=True), 1e-6)
    normed = x.materialize()
    parts = PackedParts((Fp8BlockWeight.of(codes, scale, (128, 128)), UnpackedWeight(plain)), (FP8_ROWS, PLAIN_ROWS))
    monkeypatch.setattr("app.layers.linear.pack_stored", lambda _: parts)
    layer.pack()
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    truth = F.linear(normed.float(), torch.cat((codes.float() * spread, plain.float())))
    found = layer.apart(x if is_deferred else normed)
    assert [one.shape[1] for one in found.products] == [FP8_ROWS, PLAIN_ROWS]
    error = (found.whole().float() - truth).norm() / truth.norm()
    assert error < 0.05, error  # activations are rounded to e4m3 where rows are many, and on a CPU


@pytest.mark.parametrize("is_streamed", [False, True])
def test_layers_with_adapters_or_weights_copied_in_have_products_of_their_own(is_streamed: bool) -> None:
    """Rows without an adapter keep their bits beside others', whether the step has such or not; what a step copies in
    is not read ahead."""
    cpu, groups = torch.device("cpu"), ParallelGroups(tp=RankGroup(0, 1, cast("Any", None)))
    kernels = select_attention("torch", cpu)[0]
    layer = ColumnLinear(BuildContext(torch.float32, cpu, 64, kernels, groups), 8, 4, bias=False)
    x, plain = torch.randn(2, 8), layer.ops

    def refuses(*_: object) -> torch.Tensor:
        raise AssertionError

    layer.weight.data.normal_()
    layer.ops = replace(plain, linear=refuses, beside_adapters=plain)
    with pytest.raises(AssertionError):
        layer(x)
    if is_streamed:
        layer.is_streamed = True
    else:
        layer.delta = mock.create_autospec(Delta, is_wanted=False)
    assert torch.equal(layer(x), F.linear(x, layer.weight))
