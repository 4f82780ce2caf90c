"""Weights of 4 bits, and of 8 bits in two halves, through PyTorch's products for CPUs, which read the codes as they
lie.

Those are for few rows in bf16. Many rows, and fp32, multiply some columns at a time that are made of the same codes.
In bf16 scales are rounded to it, as rounding the weights would do, and offsets, by at most 1/64 of a step where they
are the zeros of codes. Groups of 16 inputs, half of what the operator knows, have 32 places, whose other halves meet
zeros.

The operators are private to PyTorch: the order in which they keep the codes is tried out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from app.kernels.gemm import PackedWeight
from app.kernels.gemm.group import GroupWeight, of_inputs
from app.kernels.gemm.stored import StoredTiles, unpack_words

_GROUPS = (256, 128, 64, 32)  # inputs that share a scale in the operator
_SMALL = 16  # inputs, in 32 places
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_ROWS = 64  # beyond it the product of a plain weight wins, with making it
_ELEMENTS = 1 << 20  # numbers made at a time: what stays in the caches until they are multiplied


@dataclass(slots=True, frozen=True)
class Codes:
    """(code - 8) * scale + offset, of codes below 16."""

    packed: torch.Tensor  # uint8 [N / width, P, width / 2], seen as [N, P / 2]: outputs i and i + width / 2 in a byte
    scales: torch.Tensor  # [P / group, N, 2] of the compute type: scale, offset
    is_spread: bool  # P = 2 K places for K inputs in groups of 16, else K

    def numbers(self, start: int, stop: int, width: int) -> torch.Tensor:
        """Outputs start..stop, whole widths of them: fp32 [K, stop - start]."""
        count, groups = (stop - start) // width, len(self.scales)
        codes = self.packed[start:stop].view(count, -1, width // 2)
        if self.is_spread:
            codes = codes.view(count, groups, -1, width // 2)[:, :, :_SMALL].flatten(1, 2)
        out = torch.empty(codes.shape[1], count, 2, width // 2)
        halves = out.permute(2, 1, 0, 3)
        halves[0] = codes & 15
        halves[1] = codes >> 4
        # Contiguous: numbers that do not lie side by side would be multiplied one at a time.
        scale, offset = (part.unsqueeze(1).float() for part in self.scales[:, start:stop].permute(2, 0, 1).contiguous())
        numbers = out.view(groups, -1, stop - start).sub_(8).mul_(scale).add_(offset)
        return numbers.view(-1, stop - start)


@dataclass(slots=True, frozen=True)
class AtenInt4Weight(PackedWeight):
    """A weight [N, K] that is the sum of one or two of codes, each filled up to a multiple of `width` outputs."""

    halves: tuple[Codes, ...]
    shape: tuple[int, int]
    width: int
    order: torch.Tensor | None  # int64 [K]: see GroupWeight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N], in the dtype of x; any number of rows."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if len(x) and len(x) <= _MOST_ROWS and x.dtype == torch.bfloat16:
            return self._by_codes(x.contiguous(), bias)
        return self._by_numbers(x, bias)

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32 [N, K], its columns in the inputs' order."""
        return of_inputs(self._numbers(0, len(self.halves[0].packed)).t()[: self.shape[0]], self.order)

    def _by_codes(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.halves[0].is_spread:
            x = F.pad(x.view(len(x), -1, _SMALL), (0, _SMALL)).flatten(1)
        products = [_product(x, half) for half in self.halves]
        if len(products) == 1 and bias is None:
            return products[0][:, : self.shape[0]]
        out = products[0].float() if len(products) == 1 else products[0].float() + products[1]
        out = out[:, : self.shape[0]]
        return (out if bias is None else out + bias).to(x.dtype)

    def _by_numbers(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, size = self.shape
        step = max(1, _ELEMENTS // size // self.width) * self.width
        out = torch.empty(len(x), rows, dtype=x.dtype)
        for start in range(0, rows, step):
            numbers = self._numbers(start, min(start + step, len(self.halves[0].packed))).to(x.dtype)
            stop = min(rows, start + step)
            torch.mm(x, numbers[:, : stop - start], out=out[:, start:stop])
        return out if bias is None else out.add_(bias)

    def _numbers(self, start: int, stop: int) -> torch.Tensor:
        numbers = self.halves[0].numbers(start, stop, self.width)
        for half in self.halves[1:]:
            numbers += half.numbers(start, stop, self.width)
        return numbers


def pack(weight: PackedWeight, dtype: torch.dtype) -> AtenInt4Weight | None:
    """`GroupWeight`, in fp32 and bf16, where groups are multiples of 32 inputs; up to 4 bits of groups of 16, in bf16:
    others would be larger than plain ones, or are read no faster. See tiled.PackStored."""
    if not isinstance(weight, GroupWeight) or dtype not in _DTYPES:
        return None
    tiles, width = weight.tiles, _width()
    group = _group(tiles)
    may_spread = group != _SMALL or (tiles.form == "nibble" and dtype == torch.bfloat16)
    if not group or not width or not may_spread:
        return None
    codes = unpack_words(tiles.words, tiles.form, tiles.block, tiles.size)
    scale, offset = _of_groups(tiles.scales, tiles, group), _of_groups(tiles.offsets, tiles, group)
    if tiles.form == "nibble":
        scale, offset = _rounded(scale, offset, 8, dtype)
        parts = [(codes, scale, offset)]
    else:
        codes = codes ^ 0x80  # signed -> 128 more
        scale, offset = _rounded(scale, offset, 128, dtype)
        # The lower half has what rounding takes from the upper one's offset, which may be 128 steps.
        upper = offset.to(dtype).float()
        parts = [(codes >> 4, 16 * scale, upper), (codes & 15, scale, offset - upper + 8 * scale)]
    halves = tuple(_packed(*part, width, dtype) for part in parts)
    return AtenInt4Weight(halves, tiles.shape, width, weight.order)


def _group(tiles: StoredTiles) -> int:
    """The largest of the operator's groups, or half of the least, in which a scale holds throughout; 0: there is
    none."""
    shared = tiles.size if tiles.group >= tiles.size else tiles.group
    return next((size for size in (*_GROUPS, _SMALL) if shared % size == 0 and tiles.size % size == 0), 0)


def _of_groups(numbers: torch.Tensor | None, tiles: StoredTiles, group: int) -> torch.Tensor:
    """[groups, N] of the tiles' groups as fp32 [K / group, N] of the operator's; None: zeros."""
    groups, times = tiles.size // group, min(tiles.group, tiles.size) // group
    if numbers is None:
        return torch.zeros(groups, tiles.shape[0])
    return numbers.float().repeat_interleave(times, 0)[:groups]


def _rounded(
    scale: torch.Tensor, offset: torch.Tensor, middle: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale of the compute type, with the offset that keeps the code next to 0 where it is: other numbers are off by
    what rounding the scale takes from them, and not by as much of their distance from the code `middle`."""
    rounded = scale.to(dtype).float()
    zero = (offset / scale).nan_to_num(0, 0, 0).round().clamp(-middle, middle)
    return rounded, offset + zero * (rounded - scale)


def _packed(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, width: int, dtype: torch.dtype) -> Codes:
    """codes uint8 [N, K] below 16, scale and offset fp32 [K / group, N]."""
    missing = -len(codes) % width
    is_spread = codes.shape[1] == _SMALL * len(scale)
    if is_spread:
        codes = F.pad(codes.view(len(codes), -1, _SMALL), (0, _SMALL)).flatten(1)
    packed = torch._convert_weight_to_int4pack_for_cpu(F.pad(codes, (0, 0, 0, missing)).int(), 1)
    scales = F.pad(torch.stack((scale, offset), -1), (0, 0, 0, missing)).to(dtype)
    return Codes(packed, scales.contiguous(), is_spread)


def _product(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    """x [T, K] -> [T, N], both bf16; sums are in fp32."""
    group = x.shape[1] // len(codes.scales)
    out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes.packed, group, codes.scales)
    return out


@functools.cache
def _width() -> int:
    """Outputs that lie side by side in the operators' order on this processor; 0: they cannot be relied on."""
    codes = torch.arange(128 * 64).view(128, 64).remainder(15).to(torch.uint8)
    scale, offset = torch.full((2, 128), 0.5), torch.full((2, 128), 0.25)
    x = torch.linspace(-1, 1, 3 * 64).view(3, 64).bfloat16()
    truth = x.float() @ (codes.float() - 7.5).T / 2
    for width in (64, 32):
        try:
            packed = _packed(codes, scale, offset, width, torch.bfloat16)
            weight = AtenInt4Weight((packed,), (128, 64), width, None)
            results = weight._by_codes(x, None), weight._by_numbers(x, None)
        except (AttributeError, RuntimeError, TypeError, NotImplementedError):
            return 0
        # Not torch.testing: see onednn.py.
        if all(torch.allclose(result.float(), truth, rtol=2e-2, atol=2e-1) for result in results):
            return width
    return 0
