"""Defines how packed weights of few bits lie in memory, the same on every device: codes in words, beside them their
scales.

The order of the codes in a word is that of `triton_forms`. Everything here is plain PyTorch and the truth of what a
stored weight is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from app.kernels.float8 import widened

Form = Literal["nibble", "e2m1", "table", "int8", "e4m3"]
BLOCK = 128  # inputs of a row that a kernel reads at a time
_LEAST_RUN = 16  # inputs that tensor cores sum up at a time
# Where the bits of a part's code lie in a word, lowest first. Those of e2m1 are nearest to where a bf16 has them.
_E2M1_BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (9, 10, 11, 14), (0, 1, 2, 13))
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


def code_bits(form: Form, part: int) -> tuple[int, ...]:
    """Returns where the bits of a part's code lie in a word, lowest first."""
    bits = bits_of(form)
    return _E2M1_BITS[part] if form == "e2m1" else tuple(range(bits * part, bits * part + bits))


def bit_moves(sources: Sequence[int], targets: Sequence[int]) -> dict[int, int]:
    """Maps how far to the left bits come from some places to others, to which bits of those that are there then."""
    moves: dict[int, int] = {}
    for source, target in zip(sources, targets, strict=True):
        moves[target - source] = moves.get(target - source, 0) | 1 << target
    return moves


def pack_words(codes: torch.Tensor, form: Form, block: int) -> torch.Tensor:
    """uint8 [N, K], each below 2^bits -> int16 [N, ceil(K / block) * block * bits / 16]; what is behind K is 0."""
    bits = bits_of(form)
    parts, (num_rows, size) = 16 // bits, codes.shape
    codes = torch.nn.functional.pad(codes, (0, -size % block))
    split = codes.view(num_rows, codes.shape[1] // block, parts, block // parts)
    words = torch.zeros(split[:, :, 0].shape, dtype=torch.int32, device=codes.device)
    for part in range(parts):
        for left, mask in bit_moves(range(bits), code_bits(form, part)).items():
            words |= _shifted(split[:, :, part].int(), left) & mask
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).flatten(1)


def unpack_words(words: torch.Tensor, form: Form, block: int, size: int) -> torch.Tensor:
    """The codes, uint8 [N, size]."""
    bits = bits_of(form)
    parts = 16 // bits
    split = words.view(len(words), words.shape[1] * parts // block, block // parts).int()
    codes = torch.zeros(*split.shape[:2], parts, split.shape[2], dtype=torch.int32, device=words.device)
    for part in range(parts):
        for left, mask in bit_moves(code_bits(form, part), range(bits)).items():
            codes[:, :, part] |= _shifted(split, left) & mask
    return codes.to(torch.uint8).flatten(1)[:, :size]


def _shifted(numbers: torch.Tensor, left: int) -> torch.Tensor:
    return numbers << left if left >= 0 else numbers >> -left


def exponent_words(groups: torch.Tensor) -> torch.Tensor | None:
    """Scales [4 * blocks, N] that are powers of two as int32 [blocks, N]: the exponents of a block's four, as fp32 has
    them, the first one lowest; 0 stands for 0. None if some are not."""
    mantissa, exponent = torch.frexp(groups.float())
    if len(groups) % 4 or bool(((mantissa != 0.5) & (groups != 0)).any()):
        return None
    exponents = torch.where(groups == 0, 0, exponent + 126).clamp(0, 254)
    return exponents.to(torch.uint8).view(-1, 4, groups.shape[1]).transpose(1, 2).contiguous().view(torch.int32)[..., 0]


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
    # [groups, ceil(N / scale_rows)] of a floating type (groups_first), or int32 [blocks, N] (exponent_words)
    scales: torch.Tensor
    offsets: torch.Tensor | None  # the same; None: zeros
    table: torch.Tensor | None  # of form "table": [16] or [N, 16]
    size: int  # K
    block: int
    group: int  # inputs that share a scale
    scale_rows: int = 1  # outputs that share a scale

    @classmethod
    def of_bytes(cls, weight: torch.Tensor, scale: torch.Tensor, form: Form, block: int) -> StoredTiles:
        """weight of a type of one byte [N, K], scale [N, 1]."""
        size = weight.shape[1]
        words = pack_words(weight.view(torch.uint8), form, block)
        return cls(form, words, scale.float().t().contiguous(), None, None, size, block, max(size, block))

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
        codes = unpack_words(self.words[start:stop], self.form, self.block, self.size)
        if self.form == "e4m3":
            return widened(codes.view(torch.float8_e4m3fn), torch.float32)
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
        if groups.dtype == torch.int32:
            exponents = groups.unsqueeze(2).view(torch.uint8).transpose(1, 2).flatten(0, 1).int()
            groups = (exponents << 23).view(torch.float32)
        rows = torch.arange(start, stop, device=groups.device) // self.scale_rows
        of_rows = groups[:, rows].t().float()
        if len(groups) == 1:
            return of_rows
        return of_rows.repeat_interleave(self.group, dim=1)[:, : self.size]
