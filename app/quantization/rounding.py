"""Plain weights rounded to nearest, as they are loaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.gemm.fp8 import FP8, LARGEST, LEAST_SCALE, quantize_rows
from app.quantization.forms import Fp8BlockForm, Fp8RowForm, GroupForm, Int8RowForm


def to_fp8_rows(weight: torch.Tensor) -> Fp8RowForm:
    """weight [N, K]: the largest number of a row becomes 448."""
    return Fp8RowForm(*quantize_rows(weight), weight.dtype)


def to_int8_rows(weight: torch.Tensor) -> Int8RowForm:
    """weight [N, K]: the largest number of a row becomes 127."""
    numbers = weight.float()
    scale = (numbers.abs().amax(1, keepdim=True) / 127).clamp_(min=LEAST_SCALE)
    return Int8RowForm((numbers / scale).round_().to(torch.int8), scale, weight.dtype)


def to_fp8_blocks(weight: torch.Tensor, block: tuple[int, int]) -> Fp8BlockForm:
    """weight [N, K]: the largest number of a block becomes 448."""
    (rows, columns), (height, width) = weight.shape, block
    padded = F.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.view(-(-rows // height), height, -(-columns // width), width)
    scale = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    numbers = (blocks / scale).clamp_(-LARGEST, LARGEST).view(padded.shape)[:rows, :columns]
    return Fp8BlockForm(numbers.to(FP8).contiguous(), scale[:, 0, :, 0].contiguous(), block, weight.dtype)


def to_int4_groups(weight: torch.Tensor, group: int) -> GroupForm:
    """weight [N, K]: of `group` inputs in a row the largest number becomes 7.5 steps, and is cut to 7 above 0."""
    rows, columns = weight.shape
    groups = F.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    scale = (groups.abs().amax(2, keepdim=True) / 7.5).clamp_(min=LEAST_SCALE)
    codes = ((groups / scale).round_().clamp_(-8, 7) + 8).to(torch.uint8).view(rows, -1)[:, :columns]
    return GroupForm(codes.contiguous(), scale[..., 0], group, 4, weight.dtype)
