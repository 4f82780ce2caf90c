"""Describes what the blocks of GGUF's types hold: codes of few bits, with scales (and offsets) for groups of a row.

The layouts are ggml's (`ggml-quants.c`): 32 numbers with a scale in fp16, or 256 with scales of scales ("K"). A number
is code * scale + offset; without offsets, codes are symmetric around half their range; with a table it is
table[code] * scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.kernels.gemm.stored import E2M1

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(slots=True, frozen=True)
class Codes:
    """Rows of numbers."""

    codes: torch.Tensor  # uint8 [N, K]
    scale: torch.Tensor  # fp32 [N, K / g]
    bits: int
    offset: torch.Tensor | None = None  # fp32 [N, K / g]
    table: torch.Tensor | None = None  # fp32 [16]


def unpack_blocks(name: str, raw: torch.Tensor) -> Codes:
    """Blocks of the type `name`, bytes [N, blocks of a row, bytes of a block]."""
    rows = len(raw)
    found = UNPACK[name](raw.reshape(-1, raw.shape[-1]))
    offset = None if found.offset is None else found.offset.reshape(rows, -1)
    return Codes(found.codes.reshape(rows, -1), found.scale.reshape(rows, -1), found.bits, offset, found.table)


def _half(raw: torch.Tensor, at: int) -> torch.Tensor:
    """A number of fp16 in each block, fp32 [blocks, 1]."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _shifts(raw: torch.Tensor, shifts: range) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, shifts, n], shifted to the right."""
    by = torch.tensor(list(shifts), dtype=torch.uint8, device=raw.device)
    return raw.unsqueeze(1) >> by.view(1, -1, 1)


def _nibbles(raw: torch.Tensor, width: int) -> torch.Tensor:
    """Bytes [blocks, n]: of each `width` the low halves, then the high ones, [blocks, 2 n]."""
    runs = raw.reshape(-1, width)
    return (_shifts(runs, range(0, 8, 4)) & 15).reshape(len(raw), -1)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """The 32 bits of four bytes, [blocks, 32]."""
    bits = raw.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=raw.device)
    return (bits & 1).reshape(len(raw), 32)


def _q4_0(raw: torch.Tensor) -> Codes:
    return Codes(_nibbles(raw[:, 2:], 16), _half(raw, 0), 4)


def _q4_1(raw: torch.Tensor) -> Codes:
    return Codes(_nibbles(raw[:, 4:], 16), _half(raw, 0), 4, _half(raw, 2))


def _q5_0(raw: torch.Tensor) -> Codes:
    codes = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6]) << 4
    return Codes(codes, _half(raw, 0), 5)


def _q5_1(raw: torch.Tensor) -> Codes:
    codes = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8]) << 4
    return Codes(codes, _half(raw, 0), 5, _half(raw, 2))


def _q8_0(raw: torch.Tensor) -> Codes:
    return Codes(raw[:, 2:] ^ 128, _half(raw, 0), 8)  # int8 + 128


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of six bits each in twelve bytes."""
    low, middle, high = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), dim=1)
    return scales.float(), minima.float()


def _q4_k(raw: torch.Tensor) -> Codes:
    scales, minima = _k_scales(raw[:, 4:16])
    return Codes(_nibbles(raw[:, 16:], 32), _half(raw, 0) * scales, 4, -_half(raw, 2) * minima)


def _q5_k(raw: torch.Tensor) -> Codes:
    scales, minima = _k_scales(raw[:, 4:16])
    fifth = (_shifts(raw[:, 16:48], range(8)) & 1).reshape(len(raw), -1)
    codes = _nibbles(raw[:, 48:], 32) | fifth << 4
    return Codes(codes, _half(raw, 0) * scales, 5, -_half(raw, 2) * minima)


def _q6_k(raw: torch.Tensor) -> Codes:
    halves = _shifts(raw[:, 128:192].reshape(-1, 32), range(0, 8, 2)) & 3
    codes = _nibbles(raw[:, :128], 64) | halves.reshape(len(raw), -1) << 4
    scales = raw[:, 192:208].contiguous().view(torch.int8).float()
    return Codes(codes, _half(raw, 208) * scales, 6)


def _two_bits(raw: torch.Tensor) -> torch.Tensor:
    """Codes of two bits, four in a byte, 32 apart."""
    return (_shifts(raw.reshape(-1, 32), range(0, 8, 2)) & 3).reshape(len(raw), -1)


def _q2_k(raw: torch.Tensor) -> Codes:
    scales, minima = (raw[:, :16] & 15).float(), (raw[:, :16] >> 4).float()
    return Codes(_two_bits(raw[:, 16:80]), _half(raw, 80) * scales, 2, -_half(raw, 82) * minima)


def _q3_k(raw: torch.Tensor) -> Codes:
    third = (_shifts(raw[:, :32], range(8)) & 1).reshape(len(raw), -1)
    low = (_shifts(raw[:, 96:104], range(0, 8, 4)) & 15).reshape(len(raw), -1)
    high = (_shifts(raw[:, 104:108], range(0, 8, 2)) & 3).reshape(len(raw), -1)
    scales = (low | high << 4).float() - 32
    return Codes(_two_bits(raw[:, 32:96]) | third << 2, _half(raw, 108) * scales, 3)


def _table(raw: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=raw.device)


def _iq4_nl(raw: torch.Tensor) -> Codes:
    return Codes(_nibbles(raw[:, 2:], 16), _half(raw, 0), 4, table=_table(raw))


def _iq4_xs(raw: torch.Tensor) -> Codes:
    low = (raw[:, 4:8].unsqueeze(2) >> torch.tensor([0, 4], dtype=torch.uint8, device=raw.device)) & 15
    high = (raw[:, 2:4].unsqueeze(2) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device)) & 3
    scales = (low.reshape(-1, 8) | high.reshape(-1, 8) << 4).float() - 32
    return Codes(_nibbles(raw[:, 8:], 16), _half(raw, 0) * scales, 4, table=_table(raw))


def _mxfp4(raw: torch.Tensor) -> Codes:
    scale = torch.exp2(raw[:, :1].float() - 127)
    return Codes(_nibbles(raw[:, 1:], 16), scale, 4, table=E2M1.to(raw.device))


UNPACK: dict[str, Callable[[torch.Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
