"""Launches of `gluon_step`: which steps it serves, where their tensors lie, and the memory that programs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from app.kernels.launch import multiprocessors, next_power_of_2
from app.kernels.moe import GLU
from app.kernels.whole_step import StepExperts, StepLayer, StepShape, StepToken, StepWeight
from app.kernels.whole_step.forms import (
    BF16,
    FORMS,
    FP8_BLOCKS,
    MOST_STAGES,
    StepForm,
    beside,
    form_of,
    words_of,
)
from app.kernels.whole_step.gluon_attend import numbers_of_warps
from app.kernels.whole_step.gluon_copies import WIDE
from app.kernels.whole_step.gluon_step import whole_step_kernel
from app.kernels.whole_step.places import LINE, Places, Rows, addresses_of
from app.kernels.whole_step.several import ROWS, RowsTile, SeveralRows, tile_of_rows

HEAD_DIM = 128  # with 64 the kernel compiles, and is right in emulation; no GPU has run it
PROGRAMS = 128  # one on a multiprocessor, all at once
WARPS = 4  # that multiply
BOXES = 128  # lines in a stage, of as many rows as there are boxes of a row's
LINES = 16  # of a row, in a stage, at most
_STAGE_BYTES = MOST_STAGES * BOXES * LINE  # of a program
_X_BYTES = 30 << 10  # of what a product reads
_SPARE_BYTES = 2 << 10  # beside these, for scales
_COUNTERS = 64  # of a head's splits, and of all
_LONG_OF_FEW = 192  # tokens of each of few splits, at most
# Where all that splits give is no more, each program puts it together for itself. On an H200 32 KB more of it take a
# layer some 1.6 us; a program that does it for all takes 2.2 (behind 3,500 tokens of Qwen3-0.6B 0.4 more than 64 KB).
_READ_BY_ALL = 64 << 10  # bytes
_SPLITS = 16  # of a context, at most: of Qwen3-30B-A3B, 32 are slower up to 8,000 tokens


@dataclass(slots=True, frozen=True)
class StepTile:
    """Sizes that a launch goes by."""

    lines: int  # of a row of a weight, in a stage
    group: int  # rows in it
    stages: int
    splits: int  # of a context, at most
    few: int  # that each program puts together for itself
    kept: tuple[int, int]  # see StepForm


def tile_of(shape: StepShape, form: StepForm = BF16, programs: int = PROGRAMS) -> StepTile | None:
    """The tile for a shape; None: rows do not part evenly among programs, or not into stages."""
    s = shape
    if s.has_biases or s.has_sinks or s.has_windows or (s.experts is not None and s.experts.activation != GLU()):
        return None
    read = s.heads * s.head_dim
    own = s.hidden // programs
    if s.head_dim != HEAD_DIM or own & (own - 1) or s.heads & (s.heads - 1):
        return None
    if s.heads > programs or s.heads % s.kv_heads:
        return None
    if s.experts is not None and not (form in (BF16, FP8_BLOCKS) and _chooses(s.experts, programs)):
        return None
    sizes = [(lines, BOXES // lines) for lines in form.lines]
    if s.experts is not None:  # whose rows may be short: half as many lines are a stage, too
        sizes = [*sizes[:1], *((lines, group // 2) for lines, group in sizes if lines < LINES), *sizes[1:]]
    fitting = ((lines, group) for lines, group in sizes if _is_even(shape, form, lines, group, programs))
    lines, group = next(fitting, (0, 0))
    if not lines:
        return None
    most = lines * WIDE.value * form.parts
    of_warps = 2 * numbers_of_warps(s.heads // s.kv_heads, s.head_dim, lines * group * WIDE.value // s.head_dim, WARPS)
    if 2 * max(read, _chosen(s) * max(s.intermediate, most if s.experts else 0), of_warps) > _X_BYTES:
        return None
    kept = _kept(shape, form, lines, group, programs)
    stages = (_STAGE_BYTES - max(0, 4 * kept[0] * kept[1] - _SPARE_BYTES)) // (lines * group * LINE)
    splits = min(_SPLITS, programs // s.kv_heads)
    few = splits if 2 * splits * read <= _READ_BY_ALL else programs // s.heads
    return StepTile(lines, group, stages, splits, few, kept)


def _is_even(shape: StepShape, form: StepForm, lines: int, group: int, programs: int) -> bool:
    """True if rows part evenly into groups, and their lines into stages."""
    s = shape
    read = s.heads * s.head_dim
    line = WIDE.value * form.parts
    has_groups = not any(rows % (programs * group) for rows in (s.hidden, _chosen(s) * s.intermediate))
    has_groups &= (read + 2 * s.kv_heads * s.head_dim) % group == 0
    if s.experts is not None and s.intermediate < lines * line:  # of an expert a stage holds less
        has_groups &= s.intermediate % line == 0 and group * (s.intermediate // line) % lines == 0
        return has_groups and not any(k % (lines * line) for k in (s.hidden, read))
    return has_groups and not any(k % (lines * line) for k in (s.hidden, read, s.intermediate))


def _chosen(shape: StepShape) -> int:
    """Experts of a token, or 1: what all tokens go through."""
    return 1 if shape.experts is None else shape.experts.chosen


def _chooses(experts: StepExperts, programs: int) -> bool:
    """True if each expert has a program that scores it."""
    return experts.chosen <= experts.count <= programs and not experts.chosen & (experts.chosen - 1)


def _kept(shape: StepShape, form: StepForm, lines: int, group: int, programs: int) -> tuple[int, int]:
    """The most that is kept of a weight; see StepForm."""
    s = shape
    read, line, own = s.heads * s.head_dim, WIDE.value * form.parts, programs * group
    chosen = _chosen(s)
    sizes = (
        (read + 2 * s.kv_heads * s.head_dim, s.hidden), (s.hidden, read), (2 * chosen * s.intermediate, s.hidden),
        (s.hidden * chosen, s.intermediate),
    )  # fmt: skip
    return max(form.kept(-(-rows // own), group, k // line, lines) for rows, k in sizes)


def make(shape: StepShape, device: torch.device) -> PersistentStep | None:
    """See WHOLE_STEPS."""
    found = {form: tile_of(shape, form) for form in FORMS} if multiprocessors(device) >= PROGRAMS else {}
    tiles = {form: tile for form, tile in found.items() if tile is not None}
    by_rows = {rows: tile_of_rows(shape, rows, PROGRAMS) for rows in ROWS if BF16 in tiles}
    several = {rows: tile for rows, tile in by_rows.items() if tile is not None}
    return PersistentStep(shape, tiles, device, PROGRAMS, several) if tiles else None


class PersistentStep:
    """See WholeStep. Steps of one of these run one after another."""

    def __init__(
        self,
        shape: StepShape,
        tiles: Mapping[StepForm, StepTile],
        device: torch.device,
        programs: int = PROGRAMS,
        by_rows: Mapping[int, RowsTile] = MappingProxyType({}),
    ) -> None:
        self._shape, self._tiles, self._device, self._programs = shape, tiles, device, programs
        self._several = SeveralRows(shape, by_rows, device, programs) if by_rows else None
        self._places: Places | None = None
        self._form: StepForm | None = None  # of the weights that lie there
        s, bf16, fp32 = shape, torch.bfloat16, torch.float32
        size, splits = s.heads * s.head_dim, max(tile.splits for tile in tiles.values())
        activated, experts = _chosen(s) * s.intermediate, s.experts or StepExperts(0, 1, False, False)
        self._most_rows = -(-max(size + 2 * s.kv_heads * s.head_dim, s.hidden, activated) // programs)
        self._between = torch.empty(s.hidden, dtype=bf16, device=device)
        self._qkv = torch.empty(size + 2 * s.kv_heads * s.head_dim, dtype=bf16, device=device)
        behind = max(tile.lines * WIDE.value * form.parts for form, tile in tiles.items())  # is read, and not used
        self._act = torch.zeros(activated + behind, dtype=bf16, device=device)
        self._scores = torch.full((2, max(experts.count, 1)), torch.nan, dtype=fp32, device=device)
        self._choices = torch.empty(programs, 2, experts.chosen, dtype=fp32, device=device)
        self._choice = {
            "E": experts.count, "BE": next_power_of_2(max(experts.count, 1)), "TOP": experts.chosen,
            "OF_CHOSEN": experts.weighs_chosen, "ROUNDS_WEIGHTS": experts.rounds_weights,
        }  # fmt: skip
        self._parts = torch.empty((splits + 1) * size, dtype=bf16, device=device)
        self._sums = torch.empty(splits * s.heads * 2, dtype=fp32, device=device)
        self._counters = torch.zeros((1 + s.kv_heads) * _COUNTERS, dtype=torch.int32, device=device)

    def longest_with(self, weight: StepWeight, rows: int) -> int | None:
        """See WholeStep."""
        if rows == 1:
            return None
        return self._several.longest(rows) if self._several is not None and form_of([weight]) is BF16 else 0

    def run(self, x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken) -> torch.Tensor | None:
        """See WholeStep."""
        copied = [_copied(layer) for layer in layers]
        places, form = self._places_of(layers, copied), self._form
        size = layers[0].cache.shape[3]
        if places is None or form is None or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return None
        base = places.base_of(copied)
        if len(x) > 1:
            if self._several is None or form is not BF16:
                return None
            return self._several.run(x, layers, token, base, places.reach, places.lines, places.near)
        s, tile = self._shape, self._tiles[form]
        if size * s.head_dim % (tile.lines * WIDE.value):
            return None
        whole_step_kernel[(self._programs,)](
            places.boxes(base, tile.lines), base, places.lines, places.near, x, self._between, self._qkv, self._parts,
            self._sums, self._act, self._scores, self._choices, self._counters, token.blocks, token.slot, token.seq_len,
            token.cos, token.sin, len(layers), s.eps, s.scale, layers[0].cache.stride(0), H=s.hidden, QH=s.heads,
            KH=s.kv_heads, D=s.head_dim, F=s.intermediate, GROUP=tile.group, CL=tile.lines, PARTS=form.parts,
            SIDES=form.sides, KEPT_ROWS=tile.kept[0], KEPT=tile.kept[1], PROGRAMS=self._programs, STAGES=tile.stages,
            SPLITS=tile.splits, FEW=tile.few, LONG=tile.few * _LONG_OF_FEW, S=size, QK_NORM=s.norms_heads, WARPS=WARPS,
            MOST_GROUPS=next_power_of_2(-(-self._most_rows // tile.group)), FORM=form.name, **self._choice,
            num_warps=WARPS, launch_cooperative_grid=True,
        )  # fmt: skip
        return x

    def _places_of(self, layers: Sequence[StepLayer], copied: Rows) -> Places | None:
        """Those of the layers' tensors, written down anew when these have moved; None: some cannot be found so."""
        loaded = [_loaded(layer) for layer in layers]
        addresses = addresses_of(copied, loaded, [layer.cache for layer in layers])
        if self._places is None or self._places.addresses != addresses:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            self._form = form_of(weight for layer in layers for weight in _weights(layer))
            is_fitting = self._form in self._tiles and all(self._fits(layer) for layer in layers)
            self._places = Places.of(copied, loaded, addresses) if is_fitting else None
        return self._places

    def _fits(self, layer: StepLayer) -> bool:
        s = self._shape
        size = s.heads * s.head_dim
        experts = () if s.experts is None else (s.experts.count,)
        fitting = (
            layer.qkv.shape == (size + 2 * s.kv_heads * s.head_dim, s.hidden),
            layer.output.shape == (s.hidden, size),
            layer.gate_up.shape == (*experts, 2 * s.intermediate, s.hidden),
            layer.down.shape == (*experts, s.hidden, s.intermediate),
            (None if layer.router is None else layer.router.shape) == ((*experts, s.hidden) if experts else None),
            layer.cache.shape[1:3] == (2, s.kv_heads) and layer.cache.shape[4] == s.head_dim,
            (layer.query_norm is not None) == (layer.key_norm is not None) == s.norms_heads,
        )
        return all(fitting)


def _weights(layer: StepLayer) -> tuple[StepWeight, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _copied(layer: StepLayer) -> tuple[torch.Tensor, ...]:
    """Those of its tensors that the copy engine reads."""
    return *map(words_of, _weights(layer)), layer.cache


def _loaded(layer: StepLayer) -> tuple[torch.Tensor, ...]:
    """Those that plain loads read; in the place of what there is not one that nobody reads."""
    maybe = (layer.query_norm, layer.key_norm, layer.router)
    query, key, router = (layer.norm if one is None else one for one in maybe)
    scales = (one for weight in _weights(layer) for one in beside(weight))
    return layer.norm, query, key, layer.mlp_norm, layer.cache, router, *scales
