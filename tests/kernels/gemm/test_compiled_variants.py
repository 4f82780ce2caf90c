"""No step of a model with packed weights compiles a product of theirs that the start has not compiled."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from app.config.engine import EngineConfig
from app.kernels.fused import triton_ops as fused_kernels
from app.kernels.gemm import (
    PackedWeight,
    gluon_int8,
    gluon_packed,
    gluon_wide,
    lookup,
    triton_dequantize,
    triton_int8,
    triton_packed,
    triton_packed_ops,
    triton_quantize,
    triton_small,
    wide,
)
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.stored import Form, StoredTiles, bits_of, block_for
from app.worker.graphs.cuda_graphs import graph_sizes, telling_sizes
from app.worker.warmup.plan import generation_plan
from tests.kernels.noted_launches import as_compiled, noted_launches
from tests.kernels.stub_gpu import as_on

KERNELS = (
    fused_kernels, gluon_int8, gluon_packed, gluon_wide, triton_dequantize, triton_int8, triton_packed, triton_quantize,
    triton_small,
)  # fmt: skip
MULTIPROCESSORS, SHARED_BYTES = 132, 227 << 10
# Hidden size, outputs of queries, keys and values, inputs of the output projection, intermediate size.
MODELS = {
    "qwen3-0.6b": (1024, 4096, 2048, 3072),
    "gemma3-4b": (2560, 4096, 2048, 10240),
    "llama-8b": (4096, 6144, 4096, 14336),
    "qwen3-32b": (5120, 10240, 8192, 25600),
}


def tiles_of(form: Form, columns: int, size: int, group: int, *, offsets: bool = False, rows: int = 1) -> StoredTiles:
    """A stored weight whose memory nobody touches."""
    block = block_for(form, group)
    words = torch.empty(columns, size * bits_of(form) // 16, dtype=torch.int16)
    scales = torch.empty(max(1, size // group), columns // rows, dtype=torch.bfloat16)
    table = torch.empty(16, dtype=torch.bfloat16) if form == "table" else None
    return StoredTiles(form, words, scales, scales if offsets else None, table, size, block, group, rows)


def in_int8(columns: int, size: int) -> Int8Weight:
    """With a scale for each output."""
    return Int8Weight(tiles_of("int8", columns, size, size))


def in_fp8(columns: int, size: int) -> Fp8BlockWeight:
    """With a scale for each block of 128 x 128."""
    tiles = tiles_of("e4m3", columns, size, 128, rows=128)
    return Fp8BlockWeight(tiles, torch.empty(columns // 128, size // 128))


FORMS: dict[str, Callable[[int, int], PackedWeight]] = {
    "gptq": lambda *sizes: GroupWeight(tiles_of("nibble", *sizes, 128)),
    "gptq, groups of 32": lambda *sizes: GroupWeight(tiles_of("nibble", *sizes, 32)),
    "awq": lambda *sizes: GroupWeight(tiles_of("nibble", *sizes, 128, offsets=True)),
    "8 bits in groups": lambda *sizes: GroupWeight(tiles_of("int8", *sizes, 128)),
    "nf4": lambda *sizes: lookup.TableWeight(tiles_of("table", *sizes, 64)),
    "mxfp4": lambda *sizes: lookup.TableWeight(tiles_of("e2m1", *sizes, 32)),
    "int8": in_int8,
    "fp8 in blocks": in_fp8,
}


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules' kernels, as Triton compiles them for an H200; what libraries would multiply takes no time."""
    made = {}
    for module in (*KERNELS, wide, triton_packed_ops):
        for name, kernel in inspect.getmembers(module, lambda value: hasattr(value, "__getitem__")):
            if name.endswith("_kernel"):
                made.setdefault(name, as_compiled(kernel))
                monkeypatch.setattr(module, name, made[name])
    answers = {"multiprocessors": MULTIPROCESSORS, "shared_memory": SHARED_BYTES}
    for module in (wide, triton_packed_ops, triton_small, gluon_int8, triton_quantize):
        for name, answer in answers.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda _, answer=answer: answer)
    monkeypatch.setattr(torch, "mm", lambda *_, out: out)

    def product(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype, **_: object) -> torch.Tensor:
        return torch.empty(len(x), weight.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    with as_on(9):
        yield


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("model", list(MODELS))
def test_none_is_compiled_in_the_midst_of_traffic(model: str, form: str) -> None:
    hidden, projected, attended, intermediate = MODELS[model]
    make, most = FORMS[form], 8192
    weights = [
        make(projected, hidden), make(hidden, attended), make(2 * intermediate, hidden), make(hidden, intermediate),
    ]  # fmt: skip
    rows = {size: torch.empty(most, size, dtype=torch.bfloat16) for size in (hidden, attended)}
    norm, ops = torch.empty(hidden, dtype=torch.bfloat16), triton_packed_ops.OPS

    def layer(tokens: int) -> None:
        x, attention = rows[hidden][:tokens], rows[attended][:tokens]
        x, residual = ops.linear_add_norm(attention, weights[1], None, x, norm, 1e-6, True)
        h = ops.gated_linear(x, weights[2], None, "silu")
        x, _ = ops.linear_add_norm(h, weights[3], None, residual, norm, 1e-6, True)
        ops.linear(x, weights[0], None)

    config = EngineConfig(model="m", max_num_batched_tokens=most)
    plan = generation_plan(config, 1 << 15, on_gpu=True, compiles=True)
    assert plan.largest is not None
    with noted_launches() as noted:
        for tokens in {
            *telling_sizes(graph_sizes(config)),
            *(sum(step.counts) for step in (*plan.compile, plan.largest)),
        }:
            layer(tokens)
        at_start = Counter(noted.compiled)
        for tokens in (*range(1, 72), *range(72, 600, 11), *range(600, most, 377)):
            layer(tokens)
        assert Counter(noted.compiled) - at_start == Counter()
    assert at_start.total() > 3
