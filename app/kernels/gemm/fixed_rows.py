"""Products whose rows do not depend on how many there are: the library sees blocks of fixed numbers of rows only.

A library chooses its kernel, and so the order of a sum, by the shape of a product. So rows go to it in blocks of 16,
the last one filled up with zeros; blocks of other sizes join them where a trial on random numbers shows that they give
the very same bits, and that a row's bits do not depend on its place in a block. Where they do, each row goes alone. A
library's code looks at no values, so what holds for random rows holds for all. ("Batch invariance": He et al.,
"Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from app.kernels.fused.exact import act_and_mul, add_rms_norm
from app.kernels.gemm import Inputs, PackedWeight, materialize
from app.kernels.gemm.composed import composed

BLOCK = 16  # rows
_LARGE = 128  # rows of a block that reads a weight once for many
_TRIED = 1 << 18  # outputs of a trial: of sums in another order, rounded to bf16, one in 40,000 (of 64 inputs) differs
_MOST_TRIED = 1 << 12  # rows
_ALIGNMENT = 64  # bytes: of all tensors of a library's call, as it may go by that, too
Product = Callable[[torch.Tensor], torch.Tensor]  # rows [M, K] -> [M, N]
_sizes: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}  # of plain weights by their shape and type


def block_sizes(product: Product, num_inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The numbers of rows, the largest first, at which a product of rows [M, `num_inputs`] of `dtype` gives the same
    bits for a row at any place: (128, 16, 1) or fewer of them, (1,) where not even 16 rows are treated alike."""
    generator = torch.Generator().manual_seed(0)
    num_outputs = product(torch.zeros(BLOCK, num_inputs, dtype=dtype)).shape[1]
    tried = min(-(-_TRIED // num_outputs), _MOST_TRIED)  # rows
    rows = (torch.rand(-(-tried // _LARGE) * _LARGE, num_inputs, generator=generator) - 0.5).to(dtype)
    truth = _turned(product, rows, BLOCK, 0)
    # 5 and 16, and 37 and 128, have no common divisor: every place is compared with every other, by steps.
    if not torch.equal(_turned(product, rows, BLOCK, 5), truth):
        return (1,)
    sizes = [BLOCK]
    if all(torch.equal(_turned(product, rows, _LARGE, places), truth) for places in (0, 37)):
        sizes.insert(0, _LARGE)
    if all(torch.equal(product(rows[at : at + 1].clone()), truth[at : at + 1]) for at in range(max(BLOCK, tried))):
        sizes.append(1)
    return tuple(sizes)


def _turned(product: Product, rows: torch.Tensor, size: int, places: int) -> torch.Tensor:
    """Products of blocks of `size` rows, each row so many places further on in its block; in the order of `rows`."""
    blocks = (rows[at : at + size].roll(places, 0) for at in range(0, len(rows), size))
    return torch.cat([product(block).roll(-places, 0) for block in blocks])


def in_blocks(product: Product, x: torch.Tensor, num_outputs: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """x [T, K] through a product of blocks of these numbers of rows, [T, `num_outputs`] in the dtype of x."""
    out = x.new_empty(len(x), num_outputs)
    for at, rows, size in _cut(len(x), sizes):
        block = x[at : at + rows]
        if rows < size or not block.is_contiguous() or block.data_ptr() % _ALIGNMENT:
            block = x.new_zeros(size, x.shape[1])
            block[:rows] = x[at : at + rows]
        out[at : at + rows] = product(block)[:rows]
    return out


def _cut(count: int, sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first row, rows, size of their block) of each block: the largest that is full, at last one that is not."""
    blocks, at = [], 0
    while at < count:
        left = count - at
        size = next((one for one in sizes if one <= left and (one > 1 or left == 1 or sizes == (1,))), None)
        size = size or min(one for one in sizes if one > left)
        blocks.append((at, min(left, size), size))
        at += size
    return blocks


def linear(x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K], transposed, plus bias [N]: [T, N]."""
    rows = materialize(x)
    if weight.data_ptr() % _ALIGNMENT:
        weight = weight.clone()
    out = in_blocks(lambda block: F.linear(block, weight), rows, len(weight), plain_sizes(weight))
    return out if bias is None else out.add_(bias)


def plain_sizes(weight: torch.Tensor) -> tuple[int, ...]:
    """`block_sizes` of plain weights [N, K] of this shape, found by the first of them; one so empty that its sums tell
    nothing is tried anew."""
    key = (*weight.shape, weight.dtype)
    if key in _sizes:
        return _sizes[key]
    sizes = block_sizes(lambda rows: F.linear(rows, weight), weight.shape[1], weight.dtype)
    if 2 * int(weight.count_nonzero()) > weight.numel():
        _sizes[key] = sizes
    return sizes


@dataclass(slots=True, frozen=True)
class FixedRowsWeight(PackedWeight):
    """A packed weight [N, K] that multiplies block by block."""

    inner: PackedWeight
    shape: tuple[int, int]
    dtype: torch.dtype
    sizes: tuple[int, ...] = field(init=False)

    @classmethod
    def of(cls, packed: PackedWeight | None, shape: tuple[int, int], dtype: torch.dtype) -> FixedRowsWeight | None:
        """None where nothing is packed: the plain product knows its blocks itself."""
        return None if packed is None else cls(packed.even(), shape, dtype)

    def __post_init__(self) -> None:
        """Try which blocks agree, by a few small products."""
        sizes = block_sizes(lambda rows: self.inner.linear(rows, None), self.shape[1], self.dtype)
        object.__setattr__(self, "sizes", sizes)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N]."""
        out = in_blocks(lambda rows: self.inner.linear(rows, None), x, self.shape[0], self.sizes)
        return out if bias is None else out.add_(bias)


OPS = replace(composed(linear, act_and_mul, add_rms_norm), goes_by_shape=True)
