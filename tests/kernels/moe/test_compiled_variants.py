"""No step of a model with experts compiles a kernel of theirs that the start has not compiled."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.kernels.gemm import triton_quantize
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import StoredTiles
from app.kernels.moe import (
    ExpertWeights,
    RoutingRule,
    gluon_fp8,
    gluon_wide,
    triton_few,
    triton_fp8,
    triton_gate,
    triton_grouped,
    triton_ops,
    triton_sort,
    triton_stored,
    triton_sum,
)
from app.kernels.moe.stacked import StackedExperts
from app.worker.graphs.cuda_graphs import graph_sizes, telling_sizes
from app.worker.warmup.plan import compiled_steps
from tests.kernels.noted_launches import as_compiled, noted_launches
from tests.kernels.stub_gpu import as_on

SIZE, WIDTH = 512, 128
MODELS = {
    "mixtral": (8, RoutingRule(2)),
    "phi-3.5": (16, RoutingRule(2, scoring="sparsemixer")),
    "gpt-oss": (32, RoutingRule(4, scoring="softmax_of_chosen")),
    "granite": (40, RoutingRule(8, scoring="softmax_of_chosen")),
    "qwen2-moe": (60, RoutingRule(4)),
    "deepseek-v2-lite": (64, RoutingRule(6, num_shared=2)),
    "deepseek-v2-lite, shared apart": (64, RoutingRule(6)),
    "deepseek-v2": (160, RoutingRule(6, num_groups=8, groups_chosen=3, num_shared=2)),
    "olmoe": (64, RoutingRule(8)),
    "qwen3-moe": (128, RoutingRule(8, renormalize=True)),
    "qwen3.5-moe": (256, RoutingRule(8, renormalize=True, num_shared=1, gates_shared=True)),
    "llama-4": (128, RoutingRule(1, scoring="sigmoid")),
    "deepseek-v3": (256, RoutingRule(8, scoring="sigmoid", num_groups=8, groups_chosen=4, num_shared=1)),
}
STORED = ("gpt-oss", "qwen3-moe")
ROUNDED = ("qwen3-moe", "deepseek-v3", "qwen3.5-moe")


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules' kernels, as Triton compiles them."""
    modules = triton_few, triton_fp8, triton_gate, triton_grouped, triton_sort, triton_stored, triton_sum
    for module in (*modules, gluon_fp8, gluon_wide, triton_quantize):
        for name, kernel in inspect.getmembers(module, lambda value: hasattr(value, "__getitem__")):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, as_compiled(kernel))
    monkeypatch.setattr(triton_gate, "product_logits", lambda rows, weight: torch.empty(len(rows), len(weight)))
    with as_on(9):
        yield


def in_4_bits(num_experts: int, num_rows: int, size: int) -> StackedExperts:
    """As GPT-OSS has them."""
    blocks = -(-size // 128)
    words, scales = torch.zeros(num_experts, num_rows, 32 * blocks), torch.zeros(num_experts, blocks, num_rows)
    tiles = StoredTiles("e2m1", words.to(torch.int16), scales.int(), None, None, size, 128, 32)
    return StackedExperts(TableWeight(tiles), (num_experts, num_rows, size))


def in_fp8(num_experts: int, num_rows: int, size: int) -> StackedExperts:
    """As Qwen3 and DeepSeek-V3 have them."""
    words = torch.zeros(num_experts, num_rows, size // 2, dtype=torch.int16)
    scales = torch.zeros(num_experts, size // 128, num_rows // 128)
    tiles = StoredTiles("e4m3", words, scales, None, None, size, 128, 128, 128)
    return StackedExperts(Fp8BlockWeight(tiles, scales), (num_experts, num_rows, size))


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize(
    ("model", "form"),
    [*((model, "plain") for model in MODELS), *((m, "4 bits") for m in STORED), *((m, "fp8") for m in ROUNDED)],
)
def test_none_is_compiled_in_the_midst_of_traffic(model: str, form: str) -> None:
    num_experts, rule = MODELS[model]
    experts = num_experts + rule.num_shared
    zeros: Any = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)  # noqa: E731
    x, gate, norm = zeros(8192, SIZE), zeros(num_experts + rule.gates_shared, SIZE), zeros(SIZE)
    made = {"plain": zeros, "4 bits": in_4_bits, "fp8": in_fp8}[form]
    weights = ExpertWeights(made(experts, 2 * WIDTH, SIZE), made(experts, SIZE, WIDTH), num_shared=rule.num_shared)
    slots = torch.zeros(len(x), dtype=torch.int64)

    def layer(tokens: int) -> None:
        rows = x[:tokens]
        routing = triton_gate.gate(rows, gate, None, rule, slot_mapping=slots[:tokens])
        triton_ops.experts(rows, routing, weights).add_norm(rows, norm, 1e-6, True)

    config = EngineConfig(model="m", max_num_batched_tokens=len(x))
    steps = compiled_steps(config, 1 << 15, compiles=True, has_experts=True)
    with noted_launches() as noted:
        for tokens in {*telling_sizes(graph_sizes(config)), *(sum(step.counts) for step in steps)}:
            layer(tokens)
        at_start = Counter(noted.compiled)
        for tokens in (*range(1, 400), *range(400, len(x), 17)):
            layer(tokens)
        assert Counter(noted.compiled) - at_start == Counter()
    assert (at_start["wide_fp8_kernel"] == 2) == (form == "fp8"), at_start
    assert at_start["place_pairs_kernel"] <= 3, at_start
    assert at_start["gate_kernel"] <= 9, at_start
