"""Launches of `gluon_latent_step`: which steps it serves, where tensors lie, and the memory that programs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.kernels.launch import cdiv, multiprocessors, next_power_of_2
from app.kernels.whole_step import StepToken
from app.kernels.whole_step.gluon_latent import BOX
from app.kernels.whole_step.gluon_latent_step import latent_step_kernel
from app.kernels.whole_step.latents import LatentLayer, LatentShape
from app.kernels.whole_step.persistent import PROGRAMS, WARPS
from app.kernels.whole_step.places import LINE_SIZE, Places, addresses_of

STAGE_LINES = 128
_COUNTERS = 64
_LONGEST = 8192  # tokens


@dataclass(slots=True, frozen=True)
class LatentTile:
    """Sizes that a launch goes by."""

    lines: int = 16  # of a row of a weight, in a stage
    group: int = 8  # rows in it
    stages: int = 11
    ahead: int = 6  # of them on their way at once
    splits: int = 16  # of the context


TILE = LatentTile()


def serves(shape: LatentShape, tile: LatentTile = TILE, programs: int = PROGRAMS) -> bool:
    """True if rows part evenly among programs and into stages."""
    s, piece = shape, tile.lines * LINE_SIZE
    if programs % s.heads or s.heads > programs or s.rope != LINE_SIZE or s.rank % (2 * LINE_SIZE):
        return False
    spans, own, row = programs // s.heads, s.hidden // programs, s.intermediate // LINE_SIZE
    inputs = s.heads * (s.nope + s.rope) + s.rank + s.rope
    even = (
        s.heads == 16 or tile != TILE,  # columns of products on tensor cores
        s.hidden % programs == 0 and own % tile.group == 0 and own & (own - 1) == 0,
        s.rank % spans == 0 and s.value % spans == 0 and s.nope & (s.nope - 1) == 0,
        s.value // spans * (s.rank // LINE_SIZE) == STAGE_LINES and s.rank <= piece,
        inputs % tile.group == 0 and s.hidden % piece == 0 and s.heads * s.value % piece == 0,
        s.intermediate % LINE_SIZE == 0 and s.intermediate % tile.group == 0,
        (s.chosen + s.shared) * s.intermediate % (programs * tile.group) == 0,
        own * row % tile.lines == 0 and next_power_of_2(row) <= 32 and own <= 32,
        s.chosen <= s.experts <= programs and s.chosen + s.shared <= 8,
    )
    return all(even)


def make(shape: LatentShape, device: torch.device) -> PersistentLatents | None:
    """See LATENT_STEPS."""
    fits = multiprocessors(device) >= PROGRAMS and serves(shape)
    return PersistentLatents(shape, device) if fits else None


class PersistentLatents:
    """See LatentStep. Steps of one of these run one after another."""

    longest: int | None = _LONGEST

    def __init__(
        self, shape: LatentShape, device: torch.device, tile: LatentTile = TILE, programs: int = PROGRAMS
    ) -> None:
        self._shape, self._tile, self._device, self._programs = shape, tile, device, programs
        self._places: Places | None = None
        s, bf16, fp32 = shape, torch.bfloat16, torch.float32
        count, width = s.chosen + s.shared, s.rank + s.rope

        def of(size: int, dtype: torch.dtype = bf16) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._between, self._heads, self._act = of(s.hidden), of(s.heads * s.value), of(count * s.intermediate)
        self._inputs, self._query, self._new = of(s.heads * (s.nope + s.rope) + width), of(s.heads * width), of(width)
        self._parts, self._sums = of(tile.splits * s.heads * s.rank), of(2 * tile.splits * s.heads, fp32)
        self._scores = torch.full((2, s.experts), torch.nan, dtype=fp32, device=device)
        self._choices = of(programs * count, fp32)
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        own, row = s.hidden // programs, s.intermediate // LINE_SIZE
        inputs = cdiv(len(self._inputs) // tile.group, programs)
        pairs = count * s.intermediate // (programs * tile.group)
        row_lines = max(next_power_of_2(row), own)
        read = max(count * row_lines, s.heads * (width // LINE_SIZE + 1), s.heads * s.value // LINE_SIZE)
        self._constants = {
            "H": s.hidden, "QH": s.heads, "N": s.nope, "V": s.value, "R": s.rank, "DR": s.rope, "F": s.intermediate,
            "GROUP": tile.group, "CL": tile.lines, "PROGRAMS": programs, "STAGES": tile.stages, "AHEAD": tile.ahead,
            "SPLITS": tile.splits, "WARPS": WARPS, "MOST_GROUPS": next_power_of_2(max(inputs, pairs)),
            "E": s.experts, "BE": next_power_of_2(s.experts), "TOP": s.chosen, "BT": next_power_of_2(count),
            "SHARED": s.shared, "BL": row_lines, "X_CHUNKS": cdiv(max(read, s.hidden // LINE_SIZE), tile.lines),
        }  # fmt: skip

    def serves(self, x: torch.Tensor, layers: Sequence[LatentLayer]) -> bool:
        """See LatentStep."""
        return x.dtype == torch.bfloat16 and self._places_of(layers) is not None

    def run(self, x: torch.Tensor, layers: Sequence[LatentLayer], token: StepToken) -> torch.Tensor:
        """See LatentStep."""
        places = self._places_of(layers)
        assert places is not None, "layers that it does not serve"
        assert x.is_contiguous()
        s, cache = self._shape, layers[0].cache
        base = places.base_of([*map(_copied, layers)])
        lines, latents = places.boxes(base, self._tile.lines), places.boxes(base, BOX.value, s.rank + s.rope)
        latent_step_kernel[(self._programs,)](
            lines, latents, base, places.lines, places.near, x, self._between, self._inputs, self._query, self._new,
            self._parts, self._sums, self._heads, self._act, self._scores, self._choices, self._counters, token.blocks,
            token.slot, token.seq_len, token.cos, token.sin, len(layers),
            self._tile.group, (s.rank + s.rope) // LINE_SIZE, s.eps, s.latent_eps, s.scale, cache.stride(0),
            S=cache.shape[1], **self._constants, num_warps=WARPS, launch_cooperative_grid=True,
        )  # fmt: skip
        return x

    def _places_of(self, layers: Sequence[LatentLayer]) -> Places | None:
        """Those of the layers' tensors, written down anew when these have moved; None: some cannot be found so."""
        copied, loaded = [*map(_copied, layers)], [*map(_loaded, layers)]
        addresses = addresses_of(copied, loaded, [layer.cache for layer in layers])
        if self._places is None or self._places.addresses != addresses:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            self._places = Places.of(copied, loaded, addresses) if all(map(self._fits, layers)) else None
        return self._places

    def _fits(self, layer: LatentLayer) -> bool:
        s = self._shape
        width, count = s.rank + s.rope, s.experts + s.shared
        tensors = (*_copied(layer), *_loaded(layer))
        return (
            all(one.dtype == torch.bfloat16 and one.is_contiguous() for one in tensors)
            and layer.inputs.shape == (s.heads * (s.nope + s.rope) + width, s.hidden)
            and layer.up.shape == (s.heads, s.nope + s.value, s.rank)
            and layer.output.shape == (s.hidden, s.heads * s.value)
            and layer.router.shape == (s.experts, s.hidden)
            and layer.gate_up.shape == (count, 2 * s.intermediate, s.hidden)
            and layer.down.shape == (count, s.hidden, s.intermediate)
            and layer.cache.shape[1] % BOX.value == 0
            and layer.cache.shape[2] == width
        )


def _copied(layer: LatentLayer) -> tuple[torch.Tensor, ...]:
    """Those of its tensors that the copy engine reads."""
    return layer.inputs, layer.up, layer.output, layer.gate_up, layer.down, layer.cache


def _loaded(layer: LatentLayer) -> tuple[torch.Tensor, ...]:
    """Those that plain loads read."""
    return layer.norm, layer.mlp_norm, layer.latent_norm, layer.cache, layer.router, layer.up
