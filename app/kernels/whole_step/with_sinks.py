"""Launches of `gluon_sinks_step`: the steps it serves, where their tensors lie, and what programs share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.kernels.launch import cdiv, multiprocessors, next_power_of_2
from app.kernels.whole_step import StepBiases, StepExperts, StepLayer, StepShape, StepToken, StepWeight
from app.kernels.whole_step.forms import beside, tiles_of, words_of
from app.kernels.whole_step.gluon_copies import WIDE
from app.kernels.whole_step.gluon_mxfp4 import BLOCK, CHUNK, PIECES, ROWS, RUN
from app.kernels.whole_step.gluon_sinks import BOX, HEADS, D
from app.kernels.whole_step.gluon_sinks_step import CL, sinks_step_kernel
from app.kernels.whole_step.places import Places, addresses_of

PROGRAMS = 128  # one on a multiprocessor, all at once
WARPS = 4  # that multiply
STAGES = 11  # of 16 KB, and 1 KB of scales
AHEAD = 4  # of them on their way, at most: 3 % quicker than all
MOST_SPLITS = 16  # of what a group's heads see
_MOST_ROWS = 128  # of a program, of gate and up together of each half
_X_BYTES = 24 << 10  # of what a product reads
_COUNTERS = 64


def serves(shape: StepShape, programs: int = PROGRAMS) -> bool:
    """True if a step of this shape is one of these, and its rows part into groups."""
    s, experts = shape, shape.experts
    if experts is None or not (s.has_biases and s.has_sinks) or s.norms_heads or s.head_dim != D.value:
        return False
    is_clamped = experts.activation.function == "silu" and experts.activation.limit is not None
    if not is_clamped or experts.chosen != PIECES.value or not experts.chosen <= experts.count <= programs:
        return False
    of_group, rest = divmod(s.heads, s.kv_heads)
    if rest or of_group > HEADS.value or s.heads & (s.heads - 1) or s.heads % CL.value or s.kv_heads > programs:
        return False
    if s.hidden % WIDE.value or s.intermediate % WIDE.value or min(s.hidden, s.heads * s.head_dim) < CHUNK.value:
        return False
    most = max(experts.chosen * _chunks(s.intermediate), _chunks(s.hidden), _chunks(s.heads * s.head_dim))
    rows = max((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, experts.chosen * s.intermediate)
    return bool(2 * CHUNK.value * most <= _X_BYTES and _groups(rows, programs) * ROWS.value <= _MOST_ROWS)


def _chunks(size: int) -> int:
    return cdiv(size, CHUNK.value)


def _groups(rows: int, programs: int) -> int:
    """The most that a program has, and one more where that is odd."""
    found = cdiv(rows // ROWS.value, programs)
    return found + found % 2


def make(shape: StepShape, device: torch.device) -> StepWithSinks | None:
    """See WHOLE_STEPS."""
    return StepWithSinks(shape, device) if multiprocessors(device) >= PROGRAMS and serves(shape) else None


class StepWithSinks:
    """See WholeStep. Steps of one of these run one after another."""

    def __init__(self, shape: StepShape, device: torch.device, programs: int = PROGRAMS) -> None:
        assert shape.experts is not None
        self._shape, self._experts, self._device, self._programs = shape, shape.experts, device, programs
        self._places: Places | None = None
        self._seen = torch.zeros(0)  # int32 [L, 2]: windows, and groups of blocks
        self._addresses: list[int] = []  # that these were made of
        s, bf16, fp32 = shape, torch.bfloat16, torch.float32
        self._splits = min(MOST_SPLITS, 1 << (programs // s.kv_heads).bit_length() - 1)
        size, rows = s.heads * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim
        activated = self._experts.chosen * _chunks(s.intermediate) * CHUNK.value
        most = max(rows, s.hidden, self._experts.chosen * s.intermediate)
        self._most_groups = next_power_of_2(max(_MOST_ROWS // ROWS.value, _groups(most, programs)))
        self._between = torch.empty(s.hidden, dtype=bf16, device=device)
        self._qkv = torch.empty(rows, dtype=bf16, device=device)
        self._act = torch.zeros(activated, dtype=bf16, device=device)  # each expert's ends with zeros
        self._scores = torch.full((2, self._experts.count), torch.nan, dtype=fp32, device=device)
        self._choices = torch.empty(programs, 2, self._experts.chosen, dtype=fp32, device=device)
        self._parts = torch.empty(self._splits * size, dtype=bf16, device=device)
        self._sums = torch.empty(2 * self._splits * s.heads, dtype=fp32, device=device)
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)

    def longest_with(self, weight: StepWeight, rows: int) -> int | None:
        """See WholeStep."""
        return None if rows == 1 else 0

    def run(self, x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken) -> torch.Tensor | None:
        """See WholeStep."""
        if not self._is_placed(layers) or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return None
        size = layers[0].cache.shape[3]
        if self._places is None or size % BOX.value:
            return None
        s, experts, glu = self._shape, self._experts, self._experts.activation
        slots, tables = zip((token.slot, token.blocks), *token.more, strict=True)
        base = self._places.base_of([_copied(layer) for layer in layers])
        sinks_step_kernel[(self._programs,)](
            self._places.boxes(base, CL.value), base, self._places.lines, self._seen, self._places.near, x,
            self._between, self._qkv, self._parts, self._sums, self._act, self._scores, self._choices, self._counters,
            tables[0], tables[-1], slots[0], slots[-1], token.seq_len, token.cos, token.sin, len(layers), s.eps,
            s.scale, glu.limit, glu.alpha, glu.up_offset, layers[0].cache.stride(0), H=s.hidden, QH=s.heads,
            KH=s.kv_heads, F=s.intermediate, PROGRAMS=self._programs, STAGES=STAGES, AHEAD=AHEAD, SPLITS=self._splits,
            S=size, WARPS=WARPS, MOST_GROUPS=self._most_groups, E=experts.count, BE=next_power_of_2(experts.count),
            TOP=experts.chosen, OF_CHOSEN=experts.weighs_chosen, ROUNDS_WEIGHTS=experts.rounds_weights,
            num_warps=WARPS, launch_cooperative_grid=True,
        )  # fmt: skip
        return x

    def _is_placed(self, layers: Sequence[StepLayer]) -> bool:
        """Writes down anew where the layers' tensors are when these have moved; False: it cannot while a graph is
        captured."""
        copied, loaded = ([tensors(layer) for layer in layers] for tensors in (_copied, _loaded))
        seen = [(layer.window or 0, layer.group) for layer in layers]
        addresses = addresses_of(copied, loaded, [layer.cache for layer in layers])
        addresses += [one for pair in seen for one in pair]
        if self._addresses != addresses:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            is_fitting = all(_fits(layer, self._shape, self._experts) for layer in layers)
            self._places = Places.of(copied, loaded, addresses) if is_fitting else None
            self._seen = torch.tensor(seen, dtype=torch.int32).to(self._device)
            self._addresses = addresses
        return True


def _fits(layer: StepLayer, shape: StepShape, experts: StepExperts) -> bool:
    s, biases = shape, layer.biases
    size = s.heads * s.head_dim
    if biases is None or layer.sinks is None or layer.router is None or layer.group > 1:
        return False
    plain = (layer.norm, layer.qkv, layer.output, layer.mlp_norm, layer.cache, layer.router, *_of(biases))
    fitting = (
        all(isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 for one in plain),
        _is_mxfp4(layer.gate_up) and _is_mxfp4(layer.down) and all(one.is_contiguous() for one in _loaded(layer)),
        layer.qkv.shape == (size + 2 * s.kv_heads * s.head_dim, s.hidden),
        layer.output.shape == (s.hidden, size),
        layer.gate_up.shape == (experts.count, 2 * s.intermediate, s.hidden),
        layer.down.shape == (experts.count, s.hidden, s.intermediate),
        layer.router.shape == (experts.count, s.hidden),
        layer.sinks.dtype == torch.float32,
        layer.cache.shape[1:3] == (2, s.kv_heads) and layer.cache.shape[4] == s.head_dim,
    )
    return all(fitting)


def _is_mxfp4(weight: StepWeight) -> bool:
    """True if kernels find numbers of 4 bits, and of each block of 128 inputs a word of four exponents."""
    tiles = tiles_of(weight)
    if tiles is None or (tiles.form, tiles.block, tiles.group) != ("e2m1", BLOCK.value, RUN.value):
        return False
    return tiles.offsets is None and tiles.scale_rows == 1 and tiles.scales.dtype == torch.int32


def _copied(layer: StepLayer) -> tuple[torch.Tensor, ...]:
    """Those of its tensors that the copy engine reads."""
    return words_of(layer.qkv), words_of(layer.output), layer.cache


def _of(biases: StepBiases) -> tuple[torch.Tensor, ...]:
    return biases.qkv, biases.output, biases.router, biases.gate_up, biases.down


def _loaded(layer: StepLayer) -> tuple[torch.Tensor, ...]:
    """Those that plain loads read."""
    biases = layer.biases
    assert biases is not None
    assert layer.router is not None
    assert layer.sinks is not None
    gate, down = ((words_of(one), *beside(one)) for one in (layer.gate_up, layer.down))
    return (
        layer.norm, layer.mlp_norm, layer.cache, layer.router, biases.qkv, biases.output, biases.router, layer.sinks,
        *gate, biases.gate_up, *down, biases.down,
    )  # fmt: skip
