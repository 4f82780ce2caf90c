"""Tells a whole step's kernel where its layers' tensors lie: all from the one on that lies first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.launch import cdiv

LINE = 128  # bytes, in which the copy engine counts
NEAR = 16  # bytes, in which plain loads count
LINE_SIZE = LINE // 2  # words of 16 bits
_FAR = 1 << 31  # lines, as far as the copy engine counts
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

Rows = Sequence[Sequence[torch.Tensor]]  # of each layer the same tensors, in a kernel's order


@dataclass(slots=True, frozen=True)
class Places:
    """Tensors are not kept, or weights that a sleep gives back would keep their memory."""

    addresses: list[int]  # see `addresses_of`
    first: int  # of all that the copy engine reads, the one that lies first
    reach: int  # lines from there on
    lines: torch.Tensor  # int32 [L, tensors that the copy engine reads]: lines from there on
    near: torch.Tensor  # int64 [L, those that plain loads read]: how many times 16 bytes from there on

    @classmethod
    def of(cls, copied: Rows, loaded: Rows, addresses: list[int]) -> Places | None:
        """None: a tensor lies where the copy engine does not find it."""
        all_copied = [one for row in copied for one in row]
        if any(one.itemsize != 2 or not one.is_contiguous() for one in all_copied):
            return None
        index = min(range(len(all_copied)), key=lambda at: all_copied[at].data_ptr())
        first, device = all_copied[index].data_ptr(), all_copied[index].device
        far, near = ([[one.data_ptr() - first for one in row] for row in rows] for rows in (copied, loaded))
        reach = max(one.data_ptr() + one.nbytes for one in all_copied) - first
        is_aligned = not any(place % LINE for row in far for place in row)
        is_aligned &= not any(place % NEAR for row in near for place in row)
        if not is_aligned or reach >= _FAR * LINE:
            return None
        lines = torch.tensor([[place // LINE for place in row] for row in far], dtype=torch.int32)
        times = torch.tensor([[place // NEAR for place in row] for row in near], dtype=torch.int64)
        return cls(addresses, index, reach // LINE, lines.to(device), times.to(device))

    def base_of(self, copied: Rows) -> torch.Tensor:
        """The tensor that lies first."""
        width = len(copied[0])
        return copied[self.first // width][self.first % width].view(torch.bfloat16)

    def boxes(self, base: torch.Tensor, rows: int, width: int = LINE_SIZE) -> TensorDescriptor:
        """All of it in rows of `width` words, of which the copy engine brings a line's worth of so many at a time."""
        shape = [cdiv(self.reach * LINE_SIZE, width), width]  # tensors may end in the midst of a row
        return TensorDescriptor(base, shape, [width, 1], [rows, LINE_SIZE], _LAYOUT)


def addresses_of(copied: Rows, loaded: Rows, caches: Sequence[torch.Tensor]) -> list[int]:
    """Numbers that change where tensors have moved, or caches lie at the same place and reach further."""
    addresses = [one.data_ptr() for rows in (copied, loaded) for row in rows for one in row]
    return addresses + [len(cache) for cache in caches]
