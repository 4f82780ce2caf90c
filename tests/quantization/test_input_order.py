"""Columns sorted by groups of any sizes stand for the weight in the inputs' order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.errors import CheckpointError
from app.kernels.gemm.group import GroupWeight
from app.quantization.base import StoredModule
from app.quantization.compressed_tensors import CompressedTensors
from app.quantization.input_order import SHORT, is_ordered, sorted_groups
from tests.quantization.checkpoints import Shown


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("held", [64, 40, 7])
def test_the_weight_is_that_of_its_groups(has_zeros: bool, held: int) -> None:
    """A rank holds the first `held` of 64 inputs, whose 4 groups of 16 lie anywhere."""
    groups = torch.arange(64).div(16, rounding_mode="floor")[torch.randperm(64)][:held].int()
    codes = torch.randint(0, 16, (5, held), dtype=torch.uint8)
    scale, zeros = torch.rand(5, 4) + 0.1, torch.randint(0, 16, (5, 4)).float()
    offset = -zeros * scale if has_zeros else None
    form = sorted_groups(codes, scale, offset, groups, 4, torch.float32)
    zero = zeros if has_zeros else torch.full_like(zeros, 8)
    expected = (codes - zero[:, groups.long()]) * scale[:, groups.long()]
    torch.testing.assert_close(form.dequantize(), expected)
    packed, x = form.pack(), torch.randn(3, held)
    assert isinstance(packed, GroupWeight)
    torch.testing.assert_close(packed.dequantize(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.linear(x, None), x @ expected.T, rtol=1e-4, atol=1e-3)
    assert form.codes.shape[1] % form.group == 0
    assert (form.group == 16) if held == 64 else form.group == SHORT


def module(index: torch.Tensor) -> StoredModule:
    return StoredModule("m", "linear", torch.float32, 8, 40, tensors={"weight_g_idx": Shown(index)})


def test_groups_in_order() -> None:
    groups = torch.arange(40) // 16
    for index, ordered in ((groups, False), (torch.full((40,), -1), False), (groups.flip(0), True)):
        assert is_ordered(module(index), "weight_g_idx", 16) == ordered


@pytest.mark.parametrize("index", [torch.full((40,), 3), torch.arange(40) // 16 - 1, torch.zeros(39)])
def test_an_index_that_names_no_group_is_refused_by_name(index: torch.Tensor) -> None:
    """compressed-tensors' too, before anything is as large as a number in it says."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 16, "actorder": "group"}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    method = CompressedTensors.of_checkpoint({"format": "pack-quantized", "config_groups": groups})
    with pytest.raises(CheckpointError, match=r"m\.weight_g_idx names no group for each of 40 inputs"):
        method.method_of(module(index))
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks m\.weight_g_idx, the order of its inputs"):
        method.method_of(replace(module(index), tensors={}))
