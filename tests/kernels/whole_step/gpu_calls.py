"""Calls of whole steps, as decoders make them. None on AMD's GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from app.kernels.gemm.fp8_block import Fp8OnlyWeight
from app.kernels.gemm.stored import StoredTiles
from app.kernels.moe.stacked import StackedExperts
from app.kernels.whole_step import (
    StepExperts,
    StepLayer,
    StepShape,
    StepToken,
    StepWeight,
    persistent,
    persistent_latents,
    with_sinks,
)
from app.kernels.whole_step.forms import BF16, FP8, FP8_BLOCKS, INT8, StepForm, form_of
from app.kernels.whole_step.several import ROWS, tile_of_rows
from tests.kernels.target_gpu import IS_AMD, zeros
from tests.kernels.whole_step.test_gluon_nibbles import layers_of as layers_of_nibbles
from tests.kernels.whole_step.test_persistent_latents import V2_LITE, layer_of_latents, sizes_of_latents
from tests.kernels.whole_step.test_with_sinks import CHOICE, GPT_OSS, tokens_at
from tests.kernels.whole_step.test_with_sinks import layers_of as layers_with_sinks


def whole_step(shape: StepShape, form: StepForm = BF16, rows: int = 1) -> None:
    """A layer of a step of a token a row, all of it in one memory."""
    s, tile = shape, persistent.tile_of(shape, form)
    assert tile is not None
    attended, projected = s.heads * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim
    count = () if s.experts is None else (s.experts.count,)
    sizes = [(projected, s.hidden), (s.hidden, attended), (*count, 2 * s.intermediate, s.hidden)]
    sizes += [(*count, s.hidden, s.intermediate), (*count, s.hidden)]
    sizes += [(s.hidden,), (s.hidden,), (s.head_dim,), (s.head_dim,), (4, 2, s.kv_heads, 16, s.head_dim)]
    counts = [int(torch.Size(size).numel()) for size in sizes]
    parts = torch.empty(sum(counts), dtype=torch.bfloat16).split(counts)
    found = [x.view(size) for x, size in zip(parts, sizes, strict=True)]
    qkv, out, gate_up, down = (x if form is BF16 else bytes_of(x, form) for x in found[:4])
    router, norm, mlp_norm, *more = found[4:]
    heads = more[:2] if s.norms_heads else (None, None)
    layer = StepLayer(norm, qkv, heads[0], heads[1], out, mlp_norm, gate_up, down, more[2])
    layer = layer if s.experts is None else replace(layer, router=router)
    table, angles = torch.zeros(rows, 4, dtype=torch.int32), zeros(rows, s.head_dim)
    token = StepToken(angles, angles, torch.zeros(rows, dtype=torch.int64), table[:, 0].contiguous(), table)
    of_rows = tile_of_rows(s, rows, persistent.PROGRAMS)
    by_rows = {} if rows == 1 or of_rows is None else {rows: of_rows}
    step = persistent.PersistentStep(s, {form: tile}, torch.device("cpu"), persistent.PROGRAMS, by_rows)
    assert step.run(zeros(rows, s.hidden), [layer], token) is not None


def bytes_of(weight: torch.Tensor, form: StepForm) -> StepWeight:
    """A weight of 8 bits, or experts', in the first half of the memory of one in bf16."""
    (*count, columns, size), is_blocks = weight.shape, form is FP8_BLOCKS
    words = weight.view(torch.int16).view(-1)[: weight.numel() // 2].view(*count, columns, size // 2)
    scales = torch.zeros(*count, *((size // 128, columns // 128) if is_blocks else (1, columns)))
    kind, group, rows = (
        ("int8", size, 1) if form is INT8 else ("e4m3", 128 if is_blocks else size, 128 if is_blocks else 1)
    )
    tiles = StoredTiles(kind, words, scales, None, None, size, 128, group, rows)
    return StackedExperts(Fp8OnlyWeight(tiles), (*count, columns, size)) if count else tiles


def whole_step_of_nibbles(shape: StepShape, scales: torch.dtype, offsets: torch.dtype | None) -> None:
    """The same with weights of 4 bits."""
    layers = layers_of_nibbles(shape, 1, scales, offsets)
    form = form_of([layers[0].qkv])
    tile = None if form is None else persistent.tile_of(shape, form)
    assert form is not None
    assert tile is not None
    table, angles = torch.zeros(1, 4, dtype=torch.int32), zeros(shape.head_dim)
    token = StepToken(angles, angles, torch.zeros(1, dtype=torch.int64), table[0, :1], table)
    step = persistent.PersistentStep(shape, {form: tile}, torch.device("cpu"))
    assert step.run(zeros(1, shape.hidden), layers, token) is not None


def whole_step_with_sinks(shape: StepShape) -> None:
    """A layer as GPT-OSS has them."""
    step = with_sinks.StepWithSinks(shape, torch.device("cpu"))
    assert step.run(zeros(1, shape.hidden), layers_with_sinks(shape, 1), tokens_at(20, shape)) is not None


def whole_step_of_latents() -> None:
    """The same of latent attention and experts, some of them shared."""
    s = V2_LITE
    sizes = sizes_of_latents(s, num_blocks=4)
    parts = torch.empty(sum(map(math.prod, sizes)), dtype=torch.bfloat16).split([*map(math.prod, sizes)])
    layer = layer_of_latents([x.view(size) for x, size in zip(parts, sizes, strict=True)])
    table, angles = torch.zeros(1, 4, dtype=torch.int32), zeros(s.rope)
    token = StepToken(angles, angles, torch.zeros(1, dtype=torch.int64), table[0, :1], table)
    step, x = persistent_latents.PersistentLatents(s, torch.device("cpu")), zeros(1, s.hidden)
    assert step.serves(x, [layer])
    step.run(x, [layer], token)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    if IS_AMD:
        return []
    llama = StepShape(4096, 32, 8, 128, 14_336, 1e-5, 0.1, norms_heads=False)
    qwen = StepShape(1024, 16, 8, 128, 3072, 1e-6, 0.1, norms_heads=True)
    of_experts = StepExperts(128, 8, weighs_chosen=True, rounds_weights=True)
    qwen_of_experts = StepShape(2048, 32, 4, 128, 768, 1e-6, 0.1, norms_heads=True, experts=of_experts)
    few = replace(GPT_OSS, experts=replace(CHOICE, count=4))  # whose weights are made soon
    return [
        partial(whole_step_with_sinks, few),
        whole_step_of_latents,
        partial(whole_step, qwen),
        *(partial(whole_step, qwen, BF16, rows) for rows in ROWS),
        *(partial(whole_step, llama, form) for form in (BF16, INT8, FP8, FP8_BLOCKS)),
        *(partial(whole_step, qwen_of_experts, form) for form in (BF16, FP8_BLOCKS)),
        *(partial(whole_step_of_nibbles, llama, torch.float16, offsets) for offsets in (None, torch.float32)),
    ]
