"""Launches of `gluon_step`: which steps it serves, where their tensors lie, and the memory that programs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.launch import multiprocessors, next_power_of_2
from app.kernels.whole_step import StepLayer, StepShape, StepToken
from app.kernels.whole_step.gluon_copies import GROUP, WIDE, D
from app.kernels.whole_step.gluon_step import whole_step_kernel

PROGRAMS = 128  # one on a multiprocessor, all at once
WARPS = 4  # that multiply
LINES = 16  # of a row of a weight, in a stage
LINE = 128  # bytes, in which the copy engine counts
NEAR = 16  # bytes, in which plain loads count
_STAGE_BYTES = 192 << 10  # of a program
_X_BYTES = 30 << 10  # of what a product reads
_COUNTERS = 64
# Each query head reads its keys and values alone. On an H200 a step of Llama-8B, four heads to a group, took 0.19 ms
# more for each 1,000 tokens of context, layer by layer 0.12, and 0.66 less at 577: by these they meet at some 9,500. Of
# Qwen3-0.6B, two to a group, it was 0.04 and 0.11: they do not meet.
LONGEST, LEAST_OF_GROUP = 8192, 4
_FAR = 1 << 31  # lines, as far as the copy engine counts
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(slots=True, frozen=True)
class StepTile:
    """Sizes that a launch goes by."""

    lines: int  # of a row of a weight, in a stage
    stages: int
    splits: int  # of the context


def tile_of(shape: StepShape, programs: int = PROGRAMS) -> StepTile | None:
    """The tile for a shape; None: rows do not part evenly among programs, or not into stages."""
    s = shape
    read = s.heads * s.head_dim
    written = (read + 2 * s.kv_heads * s.head_dim, s.hidden, s.intermediate)
    own = s.hidden // programs
    if (
        s.head_dim != D.value
        or any(rows % (programs * GROUP.value) for rows in written)
        or own & (own - 1)
        or s.heads & (s.heads - 1)
    ):
        return None
    is_even = not any(k % (LINES * WIDE.value) for k in (s.hidden, read, s.intermediate))
    if not is_even or 2 * max(read, s.intermediate) > _X_BYTES or s.heads > programs or s.heads % s.kv_heads:
        return None
    return StepTile(LINES, _STAGE_BYTES // (GROUP.value * LINES * LINE), programs // s.heads)


def longest_of(shape: StepShape) -> int | None:
    """See `WholeStep.longest`."""
    return LONGEST if shape.heads // shape.kv_heads >= LEAST_OF_GROUP else None


def make(shape: StepShape, device: torch.device) -> PersistentStep | None:
    """See WHOLE_STEPS."""
    tile = tile_of(shape) if multiprocessors(device) >= PROGRAMS else None
    return None if tile is None else PersistentStep(shape, tile, device)


class PersistentStep:
    """See WholeStep. Steps of one of these run one after another."""

    def __init__(self, shape: StepShape, tile: StepTile, device: torch.device, programs: int = PROGRAMS) -> None:
        self._shape, self._tile, self._device, self._programs = shape, tile, device, programs
        self._places: StepPlaces | None = None
        self.longest = longest_of(shape)
        s, bf16, fp32 = shape, torch.bfloat16, torch.float32
        size = s.heads * s.head_dim
        most = max(size + 2 * s.kv_heads * s.head_dim, s.hidden, s.intermediate) // (programs * GROUP.value)
        self._most_groups = next_power_of_2(most)
        self._between = torch.empty(s.hidden, dtype=bf16, device=device)
        self._qkv = torch.empty(size + 2 * s.kv_heads * s.head_dim, dtype=bf16, device=device)
        self._act = torch.empty(s.intermediate, dtype=bf16, device=device)
        self._parts = torch.empty(tile.splits * size, dtype=bf16, device=device)
        self._sums = torch.empty(tile.splits * s.heads * 2, dtype=fp32, device=device)
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)

    def run(self, x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken) -> torch.Tensor | None:
        """See WholeStep."""
        places = self._places_of(layers)
        size = layers[0].cache.shape[3]
        if places is None or x.dtype != torch.bfloat16 or not x.is_contiguous() or size % (self._tile.lines // 2):
            return None
        s, tile = self._shape, self._tile
        lines = TensorDescriptor(
            places.base, [places.reach, WIDE.value], [WIDE.value, 1], [tile.lines, WIDE.value], _LAYOUT
        )
        whole_step_kernel[(self._programs,)](
            lines, places.base, places.lines, places.near, x, self._between, self._qkv, self._parts, self._sums,
            self._act, self._counters, token.blocks, token.slot, token.seq_len, token.cos, token.sin, len(layers),
            s.eps, s.scale, layers[0].cache.stride(0), H=s.hidden, QH=s.heads, KH=s.kv_heads, F=s.intermediate,
            CL=tile.lines, PROGRAMS=self._programs, STAGES=tile.stages, SPLITS=tile.splits, S=size,
            QK_NORM=s.norms_heads, WARPS=WARPS, MOST_GROUPS=self._most_groups, num_warps=WARPS,
            launch_cooperative_grid=True,
        )  # fmt: skip
        return x

    def _places_of(self, layers: Sequence[StepLayer]) -> StepPlaces | None:
        """Those of the layers' tensors, written down anew when these have moved; None: some cannot be found so."""
        addresses = [one.data_ptr() for layer in layers for one in _copied(layer) + _loaded(layer)]
        addresses += [len(layer.cache) for layer in layers]  # what is allocated anew may begin there, and reach further
        if self._places is None or self._places.addresses != addresses:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            is_fitting = all(self._fits(layer) for layer in layers)
            self._places = StepPlaces.of(layers, addresses) if is_fitting else None
        return self._places

    def _fits(self, layer: StepLayer) -> bool:
        s = self._shape
        size = s.heads * s.head_dim
        fitting = (
            layer.qkv.shape == (size + 2 * s.kv_heads * s.head_dim, s.hidden),
            layer.output.shape == (s.hidden, size),
            layer.gate_up.shape == (2 * s.intermediate, s.hidden),
            layer.down.shape == (s.hidden, s.intermediate),
            layer.cache.shape[1:3] == (2, s.kv_heads) and layer.cache.shape[4] == s.head_dim,
            (layer.query_norm is not None) == (layer.key_norm is not None) == s.norms_heads,
        )
        return all(fitting)


@dataclass(slots=True, frozen=True)
class StepPlaces:
    """Says where the tensors of a step's layers lie, as the kernel reads it."""

    addresses: list[int]  # of what it was made of, and how many blocks the caches have
    base: torch.Tensor  # the first of all that the copy engine reads
    reach: int  # lines from there on
    lines: torch.Tensor  # int32 [L, 5]
    near: torch.Tensor  # int64 [L, 5]

    @classmethod
    def of(cls, layers: Sequence[StepLayer], addresses: list[int]) -> StepPlaces | None:
        """None: a tensor lies where the copy engine does not find it."""
        copied = [one for layer in layers for one in _copied(layer)]
        if any(one.dtype != torch.bfloat16 or not one.is_contiguous() for one in copied):
            return None
        base = min(copied, key=lambda one: one.data_ptr())
        first = base.data_ptr()
        far = [[one.data_ptr() - first for one in _copied(layer)] for layer in layers]
        near = [[one.data_ptr() - first for one in _loaded(layer)] for layer in layers]
        reach = max(one.data_ptr() + one.nbytes for one in copied) - first
        is_aligned = not any(place % LINE for row in far for place in row) and not any(
            p % NEAR for row in near for p in row
        )
        if not is_aligned or reach >= _FAR * LINE:
            return None
        return cls(
            addresses,
            base,
            reach // LINE,
            torch.tensor([[place // LINE for place in row] for row in far], dtype=torch.int32).to(base.device),
            torch.tensor([[place // NEAR for place in row] for row in near], dtype=torch.int64).to(base.device),
        )


def _copied(layer: StepLayer) -> tuple[torch.Tensor, ...]:
    """Those of its tensors that the copy engine reads."""
    return layer.qkv, layer.output, layer.gate_up, layer.down, layer.cache


def _loaded(layer: StepLayer) -> tuple[torch.Tensor, ...]:
    """Those that plain loads read; for heads without norms one that nobody reads."""
    heads = (layer.norm if one is None else one for one in (layer.query_norm, layer.key_norm))
    return layer.norm, *heads, layer.mlp_norm, layer.cache
