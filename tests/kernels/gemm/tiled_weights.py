"""Packed weights of every kind, and what they are worth by sums written out here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from app.kernels.gemm.fp8_block import Fp8BlockWeight, Fp8OnlyWeight
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import E2M1
from app.kernels.gemm.tiled import TiledWeight


@dataclass(slots=True, frozen=True)
class Made:
    """A weight, and its numbers in float64 [N, K]."""

    weight: TiledWeight
    truth: torch.Tensor


def spread(groups: torch.Tensor, group: int, size: int) -> torch.Tensor:
    """[N, groups] -> float64 [N, size], entry by entry."""
    return torch.stack([groups[:, k // group] for k in range(size)], dim=1).double()


def grouped(
    columns: int,
    size: int,
    group: int,
    bits: int,
    *,
    is_zero_based: bool,
    is_ordered: bool = False,
    device: str = "cpu",
) -> Made:
    """q * scale + offset."""
    q = torch.randint(1 << bits, (columns, size), dtype=torch.uint8)
    scale = torch.rand(columns, -(-size // group)).half() / 16 + 0.01
    offset = torch.randn_like(scale) / 4 if is_zero_based else None
    order = torch.randperm(size) if is_ordered else None
    weight = GroupWeight.of(
        *(None if t is None else t.to(device) for t in (q, scale, offset)), bits,  # type: ignore[arg-type]
        None if order is None else order.to(device), torch.float32, group=group,
    )  # fmt: skip
    zeros = -(2.0 ** (bits - 1)) * scale.double() if offset is None else offset.double()
    truth = q.double() * spread(scale, group, size) + spread(zeros, group, size)
    if order is not None:
        truth = torch.stack([truth[:, order.tolist().index(k)] for k in range(size)], dim=1)
    return Made(weight, truth)


def tabled(
    columns: int, size: int, group: int, *, table: torch.Tensor, are_powers: bool = False, device: str = "cpu"
) -> Made:
    """table[code] * scale; are_powers: of two."""
    codes = torch.randint(16, (columns, size), dtype=torch.uint8)
    scale = torch.rand(columns, -(-size // group)).half() + 0.1
    scale = torch.exp2(scale.float().log2().round()).half() if are_powers else scale
    entries = table.expand(columns, 16).double().gather(1, codes.long())
    made = TableWeight.of(codes.to(device), table.to(device), scale.to(device), torch.float16, group=group)
    return Made(made, entries * spread(scale, group, size))


def rows_of_int8(columns: int, size: int, device: str = "cpu") -> Made:
    """A scale for each row."""
    weight, scale = torch.randint(-128, 128, (columns, size), dtype=torch.int8), (torch.rand(columns, 1) + 0.1) / 64
    return Made(Int8Weight.of(weight.to(device), scale.to(device)), weight.double() * scale.double())


def blocks_of_fp8(
    columns: int, size: int, block: tuple[int, int], device: str = "cpu", kind: Any = Fp8BlockWeight
) -> Made:
    """A scale for each block."""
    weight = torch.randn(columns, size).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    weight[:, :2] = torch.tensor([2.0**-9, -(2.0**-8)]).to(torch.float8_e4m3fn)  # without an exponent
    scale = (torch.rand(-(-columns // block[0]), -(-size // block[1])) + 0.1) / 64
    rows = torch.stack([scale[n // block[0]] for n in range(columns)])
    made = kind.of(weight.to(device), scale.to(device), block)
    return Made(made, weight.double() * spread(rows, block[1], size))


E2M1_TABLE = E2M1.clone()
ROWS_TABLE = torch.linspace(-1, 1, 16).repeat(72, 1) * torch.linspace(0.5, 1, 72)[:, None]
# name -> (device) -> weight of odd sizes
KINDS: dict[str, Callable[[str], Made]] = {
    "4 bits": lambda device: grouped(72, 300, 128, 4, is_zero_based=False, device=device),
    "4 bits, zeros": lambda device: grouped(72, 300, 128, 4, is_zero_based=True, device=device),
    "4 bits, groups of 32": lambda device: grouped(70, 256, 32, 4, is_zero_based=True, device=device),
    "4 bits, groups of 16": lambda device: grouped(64, 136, 16, 4, is_zero_based=False, device=device),
    "4 bits, rows": lambda device: grouped(64, 256, 256, 4, is_zero_based=False, device=device),
    "4 bits, groups of 24": lambda device: grouped(64, 240, 24, 4, is_zero_based=True, device=device),
    "3 bits": lambda device: grouped(64, 256, 128, 3, is_zero_based=False, device=device),
    "8 bits": lambda device: grouped(64, 256, 64, 8, is_zero_based=True, device=device),
    "act-order": lambda device: grouped(64, 256, 128, 4, is_zero_based=True, is_ordered=True, device=device),
    "e2m1": lambda device: tabled(72, 256, 32, table=E2M1_TABLE, device=device),
    "MXFP4": lambda device: tabled(72, 200, 32, table=E2M1_TABLE, are_powers=True, device=device),
    "nf4-like": lambda device: tabled(72, 256, 64, table=torch.randn(16).half(), device=device),
    "a table a row": lambda device: tabled(72, 200, 200, table=ROWS_TABLE.half(), device=device),
    "int8": lambda device: rows_of_int8(72, 300, device),
    "fp8 blocks": lambda device: blocks_of_fp8(200, 300, (128, 128), device),
    "fp8 blocks of 64": lambda device: blocks_of_fp8(72, 256, (32, 64), device),
    "MXFP8": lambda device: blocks_of_fp8(72, 200, (1, 32), device, Fp8OnlyWeight),
}
