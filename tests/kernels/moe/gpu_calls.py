"""Calls of experts' kernels, as models' layers make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from app.kernels.gemm import DeferredNorm
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import Form, StoredTiles, bits_of, block_for
from app.kernels.moe import GLU, ExpertWeights, Routing, RoutingRule, triton_gate
from app.kernels.moe import tiles as expert_tiles
from app.kernels.moe import triton_ops as expert_ops
from app.kernels.moe.stacked import StackedExperts
from tests.kernels.stub_gpu import as_on
from tests.kernels.target_gpu import IS_AMD, zeros


def stored_experts(shape: tuple[int, int, int], form: Form, group: int, scale_rows: int) -> StackedExperts:
    """Experts [E, N, K] of few bits; e2m1 with exponents."""
    (num_experts, columns, size), block = shape, block_for(form, group)
    blocks = -(-size // block)
    words = torch.empty(num_experts, columns, blocks * block * bits_of(form) // 16, dtype=torch.int16)
    groups, kind = (blocks, torch.int32) if form == "e2m1" else (-(-size // group), torch.float32)
    scales = torch.empty(num_experts, groups, columns // scale_rows, dtype=kind)
    return StackedExperts(
        TableWeight(StoredTiles(form, words, scales, None, None, size, block, group, scale_rows)), shape
    )


def experts(
    sizes: tuple[int, int, int],
    rule: RoutingRule,
    activation: GLU,
    *,
    has_bias: bool = False,
    form: tuple[Form, int, int] | None = None,
) -> None:
    """Layers of experts at every number of tokens that has tiles of its own; sizes: E, I, C."""
    num_experts, intermediate, hidden = sizes
    down = torch.empty(num_experts, hidden, intermediate, dtype=torch.bfloat16)  # as its pages are never read
    gate_up = torch.empty(num_experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
    biases = (gate_up[..., 0], down[..., 0]) if has_bias else (None, None)
    weights = ExpertWeights(gate_up, down, activation, *biases)
    if form is not None:
        packed_two = (stored_experts((num_experts, *w.shape[1:]), *form) for w in (gate_up, down))
        weights = ExpertWeights(*packed_two, activation, *biases)
    for count in (1, 32, 128, 512, 2048, 8192) if not IS_AMD else (1, 32):
        x = torch.empty(count, hidden, dtype=torch.bfloat16)
        deferred = DeferredNorm(x, torch.zeros(count, 4), 1e-6)
        routing = triton_gate.gate(x if count > 64 else deferred, gate_up[0, :num_experts], None, rule)
        table = torch.zeros(num_experts, 60, dtype=torch.int32)
        positions, counts = (torch.zeros(n, dtype=torch.int64) for n in (count, num_experts))
        expert_ops.to_slots(routing.ids, table[:, :1].contiguous())
        expert_ops.to_slots(routing.ids, table, positions, counts)
        with as_on(0 if IS_AMD else 8):
            rows = expert_ops.experts(x if count > 64 else deferred, Routing(*routing), weights)
        rows.add_norm(x, x[0], 1e-6, may_defer=True)
        rows.materialize()


def gate_of_shared() -> None:
    """Gates whose last row is that of the shared experts (Qwen3-Next, Qwen 3.5)."""
    rule = RoutingRule(8, renormalize=True, logits_dtype=torch.bfloat16, num_shared=1, gates_shared=True)
    for count in (1, 32, 512, 8192):
        x = torch.empty(count, 2048, dtype=torch.bfloat16)
        triton_gate.gate(x, zeros(257, 2048), None, rule)
        triton_gate.gate(DeferredNorm(x, torch.zeros(count, 4), 1e-6), zeros(257, 2048), None, rule)
        triton_gate.route(torch.zeros(count, 257), rule)


def rounded_experts() -> None:
    """Layers of experts that multiply activations in e4m3."""
    shape, rows = (128, 2048, 768), torch.empty(1024, 2048, dtype=torch.bfloat16)
    stacked = (stored_experts(one, "e4m3", 128, 128) for one in ((128, 1536, 2048), shape))
    packed_two = (replace(one, packed=Fp8BlockWeight(one.packed.stored, rows)) for one in stacked)
    weights = ExpertWeights(*packed_two, GLU())
    routing = Routing(torch.zeros(1024, 8, dtype=torch.int32), torch.zeros(1024, 8))
    biases = rows.new_empty(128, 1536), rows.new_empty(128, 2048)
    biased = replace(weights, activation=GLU(limit=7.0), gate_up_bias=biases[0], down_bias=biases[1], weighs_input=True)
    for tiles in (expert_tiles.FP8, expert_tiles.FP8_ANY):
        for one in (weights, biased):
            expert_ops.experts(rows, routing, one, tiles)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    gpt_oss = (32, 2880, 2880)
    return [
        partial(experts, (128, 768, 2048), RoutingRule(8, renormalize=True), GLU()),
        partial(experts, gpt_oss, RoutingRule(4, "softmax_of_chosen"), GLU(limit=7.0), has_bias=True),
        partial(experts, gpt_oss, RoutingRule(4), GLU(limit=7.0), has_bias=True, form=("e2m1", 32, 1)),
        partial(experts, (128, 768, 2048), RoutingRule(8), GLU(), form=("nibble", 128, 1)),
        partial(experts, (128, 768, 2048), RoutingRule(8), GLU(), form=("e4m3", 128, 128)),
        gate_of_shared,
        *([] if IS_AMD else [rounded_experts]),
    ]
