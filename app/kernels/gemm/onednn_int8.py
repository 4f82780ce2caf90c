"""int8 weights and activations through oneDNN's products of whole numbers (CPU).

Sums are exact in 32 bits and each row of activations has its own scale: a row's result has the same bits alone and
among others. But for a lone row in bf16, which goes a way of five operations where there are twelve: the product scales
and rounds by itself. The operators are private to PyTorch: they are tried out on numbers that a processor without such
products would cut off in 16 bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from app.kernels.gemm import PackedWeight
from app.kernels.gemm.fp8 import LEAST_SCALE
from app.kernels.gemm.int8 import LARGEST, Int8Weight
from app.kernels.gemm.stored import unpack_words

_MIDDLE = 128  # activations are unsigned here: products of signed ones have no fast path
_MEANT_FOR_ROWS = 8  # see onednn.py
_LARGEST_SCALE = 1e28  # times a sum of 32 bits it is within fp32: the product scales before it knows the weight's scale
_ROUNDED_UP = torch.tensor([_MIDDLE + 0.5])  # what is added before the fraction is cut off


@dataclass(slots=True, frozen=True)
class OneDNNInt8Weight(PackedWeight):
    """int8 numbers [N, K] in oneDNN's own order, an opaque tensor."""

    packed: torch.Tensor
    scale: torch.Tensor  # fp32 [N]
    zeros: torch.Tensor  # int32 [N]: the operator wants the weight's
    shape: tuple[int, int]  # (N, K)
    input_scale: torch.Tensor | None = None  # fp32 []; None: each row of activations has its own
    input_zero: int = 0  # what 0 becomes
    has_short_way: bool = True  # for a lone row

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], quantized -> x W^T + bias, [T, N], in the dtype of x."""
        if len(x) <= 1:
            if not len(x):
                return x.new_empty(0, self.shape[0])
            if self.has_short_way and x.dtype == torch.bfloat16 and self.input_scale is None:
                return self._of_one(x, bias)
        rounded, scale, zero = self._quantized(x)
        out = _product(rounded, self.packed, self.scale, self.zeros, zero).mul_(scale)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def even(self) -> OneDNNInt8Weight:
        """See PackedWeight."""
        return replace(self, has_short_way=False)

    def _of_one(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of x bf16 [1, K]: halves of a step are rounded up, and the result once."""
        least, most = torch.aminmax(x)
        scale = max(most.item(), -least.item(), LEAST_SCALE * LARGEST) / LARGEST
        if scale > _LARGEST_SCALE:
            return self.even().linear(x, bias)
        numbers = torch.add(_ROUNDED_UP, x.float(), alpha=1.0 / scale).to(torch.uint8)
        bias = None if bias is None else bias.float()
        return _product(numbers, self.packed, self.scale, self.zeros, _MIDDLE, scale, bias, torch.bfloat16)

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Numbers uint8 [T, K], scales, and which number is 0: `int8.quantize_rows` in fewer operations."""
        numbers, scale = x.float(), self.input_scale
        if scale is not None:
            numbers = (numbers / scale + self.input_zero).round_().clamp_(-_MIDDLE, LARGEST)
            return numbers.add_(_MIDDLE).to(torch.uint8), scale, _MIDDLE + self.input_zero
        scale = numbers.abs().amax(1, keepdim=True).div_(LARGEST).clamp_(min=LEAST_SCALE)
        # Nothing is beyond the largest of its row. Numbers in fp32 are the caller's own.
        numbers = numbers / scale if numbers is x else numbers.div_(scale)
        return numbers.round_().add_(_MIDDLE).to(torch.uint8), scale, _MIDDLE

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32 [N, K]: its products with one input at a time."""
        inputs = torch.eye(self.shape[1], dtype=torch.uint8).add_(_MIDDLE)
        return _product(inputs, self.packed, self.scale, self.zeros, _MIDDLE).t()


def pack(weight: PackedWeight, dtype: torch.dtype) -> OneDNNInt8Weight | None:
    """`Int8Weight`, whatever the model computes in; see tiled.PackStored."""
    if not isinstance(weight, Int8Weight) or not _works():
        return None
    tiles = weight.tiles
    numbers = unpack_words(tiles.words, tiles.form, tiles.block, tiles.size).contiguous().view(torch.int8)
    zero = 0 if weight.input_zero is None else int(weight.input_zero)
    return replace(_packed(numbers, tiles.scales.flatten(), weight.input_scale, zero), has_short_way=_goes_short())


def _packed(
    numbers: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor | None = None, input_zero: int = 0
) -> OneDNNInt8Weight:
    rows, size = numbers.shape
    packed = torch.ops.onednn.qlinear_prepack(numbers, [_MEANT_FOR_ROWS, size])
    zeros = torch.zeros(rows, dtype=torch.int32)
    return OneDNNInt8Weight(packed, scale, zeros, (rows, size), input_scale, input_zero)


def _product(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor,
    zero: int,
    input_scale: float = 1.0,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(x - zero) W^T * scale * input_scale + bias, [T, N] of `dtype`, of x uint8 [T, K] and bias fp32 [N]."""
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x, input_scale, zero, packed, scale, zeros, bias, 1.0, 0, dtype, "none", [], ""
    )
    return out


@functools.cache
def _goes_short() -> bool:
    """True if the operator scales by itself, and rounds to bf16 once: behind the bias, which shows in these sums."""
    numbers = torch.tensor([[127, -127], [-127, 127]], dtype=torch.int8).repeat(16, 32)
    x, bias = torch.tensor([[254.0, -254.0]]).repeat(1, 32).bfloat16(), torch.tensor([2000.0, -2000.0]).repeat(16)
    try:
        found = _packed(numbers, torch.full((len(numbers),), 0.5))._of_one(x, bias.bfloat16())
        return torch.equal(found, (x.float() @ numbers.float().T / 2 + bias).bfloat16())
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


@functools.cache
def _works() -> bool:
    numbers = torch.tensor([[127, -128], [127, 127], [-128, 1]], dtype=torch.int8).repeat(16, 32)
    x = torch.tensor([[127.0, -128.0], [127.0, 126.0], [-128.0, -128.0]]).repeat(1, 32)
    try:
        weight = _packed(numbers, torch.ones(len(numbers)), torch.tensor(1.0))
        return torch.equal(weight.linear(x, None), x @ numbers.float().T)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
