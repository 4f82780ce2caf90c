"""Launches of `gluon_rows_step`: steps of several rows, each with one token, of plain weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.launch import next_power_of_2
from app.kernels.whole_step import StepLayer, StepShape, StepToken
from app.kernels.whole_step.gluon_attend import numbers_of_warps
from app.kernels.whole_step.gluon_copies import WIDE
from app.kernels.whole_step.gluon_rows import GROUP, HALF, PART, D
from app.kernels.whole_step.gluon_rows_step import COUNTERS, rows_step_kernel

ROWS = (2, 4, 8)  # that there are kernels for
WARPS = 4  # that multiply
# On an H200 Qwen3-0.6B took 0.69, 0.75 and 0.85 ms for 2, 4 and 8 rows of 577 tokens, layer by layer 1.02, 1.06, 1.14.
# Llama-8B's layers were not quicker (four rows 4.08 ms for some 4.2, eight 4.84); nothing between them was measured.
MOST_HIDDEN = 1024
LONGEST = 2048  # tokens of a row, of which they were timed
_SHARED_BYTES = 224 << 10  # of a program, without barriers and what reductions want
_STAGE_BYTES = 16 << 10
_VECTOR_BYTES = 48 << 10  # for which a program's warps have registers
_MOST_STAGES, _LEAST_STAGES = 12, 6
_LINES, _LEAST_LINES = 128, 16  # of the cache, in a box of the copy engine
_LAYOUT, _HALVES = (gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3))


@dataclass(slots=True, frozen=True)
class RowsTile:
    """Sizes that a launch goes by."""

    at_once: int  # numbers of the widest vectors for which there is room at once
    stages: int
    slots: int  # parts of all contexts


def tile_of_rows(shape: StepShape, rows: int, programs: int) -> RowsTile | None:
    """The tile for a shape; None: rows do not part evenly among programs, or there is no place for the vectors."""
    s, group, chunk = shape, GROUP.value, 2 * PART.value
    read = s.heads * s.head_dim
    is_even = s.head_dim == D.value and s.experts is None and not s.heads % s.kv_heads and s.hidden <= MOST_HIDDEN
    is_even = is_even and not any(columns % (programs * group) for columns in (s.hidden, s.intermediate))
    is_even = is_even and not any(k % chunk for k in (s.hidden, read, s.intermediate))
    own, slots = s.hidden // programs, programs // s.kv_heads
    if not is_even or own & (own - 1) or slots & (slots - 1) or slots * s.kv_heads != programs or slots < 2 * rows:
        return None
    most = _VECTOR_BYTES // (2 * rows)
    at_once = max((k for k in range(chunk, most + 1, chunk) if not s.intermediate % k), default=0)
    if not at_once or max(s.hidden, read) > most:
        return None
    of_warps = numbers_of_warps(s.heads // s.kv_heads, s.head_dim, _STAGE_BYTES // (2 * s.head_dim), WARPS)
    vectors = 2 * max(rows * max(s.hidden, read, at_once), 2 * of_warps)
    results = 8 * rows * group * most_groups(s, programs)
    sums = 4 * slots * s.heads + 12 * of_warps // s.head_dim
    stages = min(_MOST_STAGES, (_SHARED_BYTES - vectors - results - sums) // _STAGE_BYTES)
    return RowsTile(at_once, stages, slots) if stages >= _LEAST_STAGES else None


def most_groups(shape: StepShape, programs: int) -> int:
    """Groups of rows of a weight (gate's) that a program has, at most; a power of 2."""
    s = shape
    most = max((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, s.intermediate)
    return next_power_of_2(-(-most // (programs * GROUP.value)))


class SeveralRows:
    """Runs steps of as many rows as there are tiles for."""

    def __init__(self, shape: StepShape, tiles: Mapping[int, RowsTile], device: torch.device, programs: int) -> None:
        self._shape, self.tiles, self._programs = shape, tiles, programs
        s, rows = shape, max(tiles)
        slots = max(tile.slots for tile in tiles.values())
        size = s.heads * s.head_dim
        new = partial(torch.empty, dtype=torch.bfloat16, device=device)
        self._between, self._qkv = new(rows, s.hidden), new(rows, size + 2 * s.kv_heads * s.head_dim)
        self._act, self._parts = new(rows, s.intermediate), new(slots + rows, size)
        self._sums = torch.empty(2, slots * s.heads, dtype=torch.float32, device=device)
        self._counters = torch.zeros(COUNTERS.value + rows * s.kv_heads, dtype=torch.int32, device=device)

    def longest(self, rows: int) -> int | None:
        """See WholeStep."""
        return LONGEST if rows in self.tiles else 0

    def _box(self, base: torch.Tensor, reach: int, k: int) -> TensorDescriptor:
        """All of memory as rows of k numbers see it, from any line on: half a stage is copied at a time."""
        wide, group = WIDE.value, GROUP.value
        shape = [group, reach - (group - 1) * (k // wide), wide]
        return TensorDescriptor(base, shape, [k, wide, 1], [group, HALF.value, wide], _HALVES)

    def run(
        self, x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken, base: torch.Tensor, reach: int,
        p_lines: torch.Tensor, near: torch.Tensor,
    ) -> torch.Tensor | None:  # fmt: skip
        """See WholeStep."""
        s, tile, size = self._shape, self.tiles.get(len(x)), layers[0].cache.shape[3]
        lines = min(_LINES, 2 * (size & -size))  # of a box that lies in one block
        if tile is None or lines < _LEAST_LINES:
            return None
        wide = WIDE.value
        boxes = [self._box(base, reach, k) for k in (s.hidden, s.heads * s.head_dim, s.intermediate)]
        boxes.append(TensorDescriptor(base, [reach, wide], [wide, 1], [lines, wide], _LAYOUT))
        rows_step_kernel[(self._programs,)](
            *boxes, base, p_lines, near, x, self._between, self._qkv, self._parts, self._sums, self._act,
            self._counters, token.blocks, token.slot, token.seq_len, token.cos, token.sin, len(layers), s.eps, s.scale,
            layers[0].cache.stride(0), token.blocks.stride(-2), ROWS=len(x), H=s.hidden, QH=s.heads, KH=s.kv_heads,
            F=s.intermediate, PROGRAMS=self._programs, AT_ONCE=tile.at_once,
            STAGES=tile.stages, SLOTS=tile.slots, S=size, QK_NORM=s.norms_heads, WARPS=WARPS,
            MOST_GROUPS=most_groups(s, self._programs), num_warps=WARPS, launch_cooperative_grid=True,
        )  # fmt: skip
        return x
