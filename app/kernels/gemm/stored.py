"""How packed weights of few bits lie in memory, the same on every device: codes in words, beside them their scales.

The order of the codes in a word is that of `triton_forms`. Everything here is plain PyTorch and the truth of what a
stored weight is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Form = Literal["nibble", "e2m1", "table", "int8", "e4m3"]
BLOCK = 128  # inputs of a row that a kernel reads at a time
_LEAST_RUN = 16  # inputs that tensor cores sum up at a time
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def bits_of(form: Form) -> int:
    """Bits of a code."""
    return 8 if form in ("int8", "e4m3") else 4


def block_for(form: Form, group: int) -> int:
    """The largest block, up to BLOCK, that has a scale, or each of whose parts has one."""
    parts, block = 16 // bits_of(form), BLOCK
    while group % block and group % (block // parts) and block > parts * _LEAST_RUN:
        block //= 2
    return block


def pack_words(codes: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """uint8 [N, K], each below 2^bits -> int16 [N, ceil(K / block) * block * bits / 16]; what is behind K is 0."""
    parts, (num_rows, size) = 16 // bits, codes.shape
    codes = torch.nn.functional.pad(codes, (0, -size % block))
    split = codes.view(num_rows, codes.shape[1] // block, parts, block // parts)
    words = torch.zeros(split[:, :, 0].shape, dtype=torch.int32, device=codes.device)
    for part in range(parts):
        words |= split[:, :, part].int() << (bits * part)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).flatten(1)


def unpack_words(words: torch.Tensor, bits: int, block: int, size: int) -> torch.Tensor:
    """The codes, uint8 [N, size]."""
    parts = 16 // bits
    split = words.view(len(words), words.shape[1] * parts // block, 1, block // parts).int()
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=words.device).view(parts, 1)
    return ((split >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)[:, :size]


def within_range(groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in `dtype`, in fp32 where that would take more from one than a few bits, as fp16 does from small ones."""
    rounded = groups.to(dtype)
    return rounded if torch.allclose(rounded.float(), groups.float(), rtol=2.0**-8, atol=0.0) else groups.float()


def groups_first(groups: torch.Tensor, size: int, block: int, group: int) -> torch.Tensor:
    """[N, groups] of K = size -> [groups, N], with zeros for what blocks hold behind K."""
    padded = -(-size // block) * block
    return torch.nn.functional.pad(groups, (0, -(-padded // group) - groups.shape[1])).t().contiguous()


@dataclass(slots=True, frozen=True)
class StoredTiles:
    """A weight [N, K]: number(code) * scale + offset."""

    form: Form
    words: torch.Tensor  # int16 [N, blocks * block * bits / 16]
    scales: torch.Tensor  # [groups, ceil(N / scale_rows)] of a floating type (groups_first)
    offsets: torch.Tensor | None  # the same; None: zeros
    table: torch.Tensor | None  # of form "table": [16] or [N, 16]
    size: int  # K
    block: int
    group: int  # inputs that share a scale
    scale_rows: int = 1  # outputs that share a scale

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self.words), self.size

    @property
    def run(self) -> int:
        """Inputs of a part of a block."""
        return self.block * bits_of(self.form) // 16

    @property
    def scales_of_block(self) -> int | None:
        """Parts of a block with a scale for each, as kernels read them; 0: a scale holds for whole rows; None: groups
        of columns that no kernel reads."""
        if self.group >= self.size and self.offsets is None and self.scale_rows == 1:
            return 0
        if self.group % self.block == 0 or self.group >= self.size:
            return 1
        if self.block % self.group == 0 and self.group % self.run == 0:
            return self.block // self.group
        return self.block // self.run if self.group % self.run == 0 else None

    def numbers(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop without their scales, fp32 [stop - start, K]."""
        codes = unpack_words(self.words[start:stop], bits_of(self.form), self.block, self.size)
        if self.form == "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
        if self.form == "int8":
            return codes.view(torch.int8).float()
        if self.form == "nibble":
            return codes.float() - 8.0
        table = E2M1.to(codes.device) if self.table is None else self.table
        if table.dim() == 1:
            return table.float()[codes.int()]
        return table[start:stop].float().gather(1, codes.long())

    def dequantize(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start..stop, fp32 [stop - start, K]."""
        stop = len(self.words) if stop is None else min(stop, len(self.words))
        out = self.numbers(start, stop).mul_(self._spread(self.scales, start, stop))
        return out if self.offsets is None else out.add_(self._spread(self.offsets, start, stop))

    def _spread(self, groups: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """[groups, N / scale_rows] -> fp32 [stop - start, K]."""
        rows = torch.arange(start, stop, device=groups.device) // self.scale_rows
        of_rows = groups[:, rows].t().float()
        if len(groups) == 1:
            return of_rows
        return of_rows.repeat_interleave(self.group, dim=1)[:, : self.size]
