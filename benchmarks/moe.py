"""Layers of experts on a GPU, launch by launch and whole, beside what the memory and PyTorch's grouped product allow.

    python -m benchmarks.moe [--shape qwen3-30b-a3b ...] [--tokens 1 8 32 ...] [--out results/moe.json]

A layer is gate, grouped products, and the sum with the residual and the next norm. Several layers with weights of their
own run one after another in one CUDA graph, so that no weight is in a cache; random rows and gates route about evenly.
The share of the bandwidth is that of the weights of the experts that were chosen, counted, in the whole layer's time.
Beside it stand two `torch.nn.functional.grouped_mm` with the activation in between, over rows that are sorted already.
Each result is first compared with PyTorch's. Times in us.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from app.kernels.fused.triton_ops import act_and_mul
from app.kernels.gemm import Activations, materialize
from app.kernels.moe import GLU, ExpertWeights, Routing, RoutingRule, reference, triton_ops
from app.kernels.moe.triton_gate import gate
from app.kernels.moe.triton_sort import sort_pairs
from benchmarks.roofline import BANDWIDTH

# E, K, I, C, rule, activation, whether there are biases
SHAPES: dict[str, tuple[int, int, int, int, RoutingRule, GLU, bool]] = {
    "qwen3-30b-a3b": (128, 8, 768, 2048, RoutingRule(8, renormalize=True), GLU(), False),
    "deepseek-v2-lite": (64, 6, 1408, 2048, RoutingRule(6, num_shared=2), GLU(), False),
    "gpt-oss-20b": (
        32, 4, 2880, 2880, RoutingRule(4, "softmax_of_chosen"), GLU(limit=7.0, alpha=1.702, up_offset=1.0), True,
    ),
    "tiny": (8, 2, 32, 64, RoutingRule(2), GLU(), True),
}  # fmt: skip
TOKENS = (1, 8, 32, 128, 256, 512, 2048, 4096, 8192)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there only to be tried out, in the interpreter
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
EPS = 1e-6


class Layer:
    """One layer's weights."""

    def __init__(self, shape: str) -> None:
        num_experts, _, intermediate, hidden, self.rule, activation, has_bias = SHAPES[shape]
        all_experts = num_experts + self.rule.num_shared
        self.gate = normal(num_experts, hidden, scale=hidden**-0.5)
        self.norm = torch.ones(hidden, dtype=DTYPE, device=DEVICE)
        biases = (normal(all_experts, 2 * intermediate), normal(all_experts, hidden)) if has_bias else (None, None)
        gate_up = normal(all_experts, 2 * intermediate, hidden, scale=hidden**-0.5)
        down = normal(all_experts, hidden, intermediate, scale=intermediate**-0.5)
        self.experts = ExpertWeights(gate_up, down, activation, *biases)
        self.chosen: torch.Tensor | None = None

    def __call__(self, x: Activations, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """The whole block."""
        routing = gate(x, self.gate, None, self.rule)
        self.chosen = routing.ids
        return triton_ops.experts(x, routing, self.experts).add_norm(residual, self.norm, EPS, may_defer=True)

    def distinct(self) -> int:
        """Experts that the last call chose."""
        assert self.chosen is not None
        return len(self.chosen.unique())


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random weights, made part by part, as in fp32 they would take too much memory."""
    out = torch.empty(shape, dtype=DTYPE, device=DEVICE)
    for part in out if len(shape) == 3 else [out]:
        part.copy_(torch.randn(part.shape, device=DEVICE) * scale)
    return out


def graph_us(call: Callable[[], object], per_call: int) -> float:
    """Microseconds of one of the `per_call` things that the call does."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began) / per_call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes what the calls read
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        graph.replay()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * median(times) / per_call


def launches(call: Callable[[], object]) -> int:
    """Kernels that a call runs on the GPU."""
    if DEVICE == "cpu":
        return 0
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = profile.events() or []
    return sum(event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name for event in events)


def library_us(layer: Layer, routing: Routing, x: torch.Tensor) -> float:
    """PyTorch's grouped products over sorted rows."""
    ids = routing.ids.flatten().long()
    counts = torch.bincount(ids, minlength=len(layer.experts.down))
    offsets = counts.cumsum(0).int()
    rows = x[ids.argsort(stable=True) // routing.ids.shape[1]]
    gate_up, down = layer.experts.gate_up, layer.experts.down
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)

    def products() -> torch.Tensor:
        h = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=offsets)
        return F.grouped_mm(act_and_mul(h, "silu"), down.transpose(1, 2), offs=offsets)

    return graph_us(products, 1)


def check(layer: Layer, x: torch.Tensor, residual: torch.Tensor) -> float:
    """Relative error of the block against PyTorch's by the same routing."""
    normed, total = layer(x, residual)
    assert layer.chosen is not None
    routing = gate(x, layer.gate, None, layer.rule)
    truth = reference.gate(x, layer.gate, None, layer.rule)
    same = float((routing.ids == truth.ids).float().mean())
    assert same > 0.999, f"only {same} of the experts are the right ones"
    expected = reference.experts(x, routing, layer.experts).add_norm(residual, layer.norm, EPS, may_defer=False)
    errors = [
        float((found.float() - true.float()).norm() / true.float().norm())
        for found, true in ((materialize(normed), materialize(expected[0])), (total, expected[1]))
    ]
    return max(errors)


def measure(shape: str, layers: list[Layer], tokens: int) -> dict[str, Any]:
    """One line of the table."""
    hidden = SHAPES[shape][3]
    x, residual = normal(tokens, hidden), normal(tokens, hidden)
    first, used = layers[0], layers if tokens <= 512 else layers[:2]
    error = check(first, x, residual)
    assert error < 2e-2, f"off by {error}"

    def block() -> None:
        for layer in used:
            layer(x, residual)

    routings = [gate(x, layer.gate, None, layer.rule) for layer in used]
    rows = [
        triton_ops.experts(x, routing, layer.experts) for layer, routing in zip(used, routings, strict=True)
    ]  # fmt: skip
    row: dict[str, Any] = {"shape": shape, "tokens": tokens, "error": error, "block": graph_us(block, len(used))}
    row["launches"] = launches(lambda: first(x, residual))
    row["gate"] = graph_us(lambda: [gate(x, layer.gate, None, layer.rule) for layer in used], len(used))
    row["sort"] = graph_us(lambda: sort_pairs(routings[0].ids, len(first.experts.down), 128), 1)
    row["products"] = graph_us(
        lambda: [triton_ops.experts(x, r, layer.experts) for layer, r in zip(used, routings, strict=True)], len(used)
    )
    row["sum"] = graph_us(lambda: [r.add_norm(residual, first.norm, EPS, may_defer=True) for r in rows], len(used))
    rows.clear()
    distinct = sum(layer.distinct() for layer in used) / len(used)
    each = sum(w[0].numel() * w.element_size() for w in (first.experts.gate_up, first.experts.down))  # type: ignore[index, union-attr]
    row["distinct"] = distinct
    row["floor"] = 1e6 * distinct * each / BANDWIDTH
    row["GB/s"] = distinct * each / row["block"] / 1e3
    row["TFLOP/s"] = 2 * routings[0].ids.numel() * (each // DTYPE.itemsize) / row["block"] / 1e6
    try:
        row["grouped_mm"] = library_us(first, routings[0], x)
    except Exception as error:  # not every build has it, for every shape
        row["grouped_mm"] = float("nan")
        row["grouped_mm error"] = str(error)[:200]
    return row


def main() -> None:
    """Print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", nargs="+", default=["qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"], choices=list(SHAPES)
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = []
    columns = ("block", "gate", "sort", "products", "sum", "floor", "grouped_mm")
    print(
        f"{'shape':18s}{'tokens':>7s}{'distinct':>9s}"
        + "".join(f"{c:>11s}" for c in columns)
        + "  GB/s TFLOP/s launches error"
    )
    for shape in args.shape:
        layers = [Layer(shape) for _ in range(args.layers)]
        for tokens in args.tokens:
            try:
                row = measure(shape, layers, tokens)
            except Exception as error:  # the others are still worth it
                print(f"{shape} {tokens}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            table.append(row)
            numbers = "".join(f"{row[c]:11.1f}" for c in columns)
            print(
                f"{shape:18s}{tokens:7d}{row['distinct']:9.1f}{numbers} {row['GB/s']:5.0f} {row['TFLOP/s']:6.0f}"
                f" {row['launches']:4d} {row['error']:.1e}", flush=True,
            )  # fmt: skip
            if args.out is not None:
                args.out.write_text(json.dumps(table, indent=1))
        del layers


if __name__ == "__main__":
    main()
