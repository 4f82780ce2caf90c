"""Recurrent layers on a GPU in bf16: each kernel compared with the reference in fp32, then timed.

    python -m benchmarks.recurrent [--out results/recurrent.json]

Gated delta net at Qwen 3.5's sizes, Mamba 2 at Nemotron-H's. Decodes: GB/s are those of the states, read and written;
several layers with states of their own run one after another in one CUDA graph. Prefills: us a layer, of one prompt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, SpaceInputs, StateStep, reference, triton_ops

HEADS = DeltaHeads(num_keys=16, num_values=32, key_dim=128, value_dim=128)
SPACE = (128, 64, 8, 128)  # heads, their size, groups, states
STATE_BYTES = 600 << 20  # of the layers of a graph: several times what a GPU keeps
DECODES, PREFILLS, CHECKED = (1, 32, 256), (2048, 8192), (1, 63, 200)
Row = dict[str, Any]


def step_of(counts: list[int], context: int) -> StateStep:
    """Requests that bring so many tokens each, after `context` tokens."""
    starts = np.concatenate(([0], np.cumsum(counts)))
    rows = torch.randperm(len(counts)).int().cuda()
    return StateStep.of(
        AttentionMetadata(
            torch.from_numpy(starts).int().cuda(), torch.tensor(counts).int().cuda() + context, rows,
            torch.arange(starts[-1]).cuda(), max(counts), context + max(counts), sum(count == 1 for count in counts),
            host_starts=starts, rows=rows,
        )
    )  # fmt: skip


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers on the GPU."""
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def delta_layer(num_tokens: int) -> tuple[Callable[..., torch.Tensor], tuple[int, ...]]:
    """(what runs a gated delta net with given operations, type, states and step; the shape of a state)."""
    h, fp32 = HEADS, torch.float32
    mixed, gate = randn(num_tokens, sum(h.widths)), randn(num_tokens, h.widths[2])
    a, b, weight = randn(num_tokens, h.num_values), randn(num_tokens, h.num_values), randn(h.value_dim)
    a_log, dt_bias = randn(h.num_values, scale=0.5, dtype=fp32), randn(h.num_values, dtype=fp32)

    def run(ops: Any, dtype: torch.dtype, states: torch.Tensor, step: StateStep) -> torch.Tensor:
        gates = DeltaGates(a.to(dtype), b.to(dtype), a_log, dt_bias)
        norm = GatedNorm(gate.to(dtype), weight.to(dtype), 1e-6)
        return ops.gated_delta(mixed.to(dtype), h, gates, norm, states, step)  # type: ignore[no-any-return]

    return run, (h.num_values, h.value_dim, h.key_dim)


def space_layer(num_tokens: int) -> tuple[Callable[..., torch.Tensor], tuple[int, ...]]:
    """The same of Mamba 2."""
    h, p, g, n = SPACE
    x, b, c, dt = randn(num_tokens, h, p), randn(num_tokens, g, n), randn(num_tokens, g, n), randn(num_tokens, h)
    numbers = [randn(h, scale=0.5, dtype=torch.float32) for _ in range(3)]

    def run(ops: Any, dtype: torch.dtype, states: torch.Tensor, step: StateStep) -> torch.Tensor:
        inputs = SpaceInputs(x.to(dtype), b.to(dtype), c.to(dtype), dt.to(dtype), *numbers)
        return ops.state_space(inputs, states, step)  # type: ignore[no-any-return]

    return run, (h, p, n)


LAYERS = {"delta": delta_layer, "space": space_layer}


def check(name: str) -> Row:
    """Largest differences from the reference, as shares of the largest number: results and states."""
    row: Row = {"what": f"{name} against the reference"}
    counts = list(CHECKED)
    run, shape = LAYERS[name](sum(counts))
    step = step_of(counts, 5)
    before = randn(len(counts), *shape, dtype=torch.float32)
    exact_states = before.clone()
    exact = run(reference.OPS, torch.float32, exact_states, step)
    for dtype in (torch.float32, torch.bfloat16):
        states = before.clone()
        found = run(triton_ops.OPS, dtype, states, step).float()
        kind = str(dtype).removeprefix("torch.")
        row[f"{kind}_result"] = float((found - exact).abs().max() / exact.abs().max())
        row[f"{kind}_state"] = float((states - exact_states).abs().max() / exact_states.abs().max())
    return row


def graph_us(runs: list[Callable[[], Any]]) -> float:
    """Median time of one of the runs, captured one behind the other."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(runs))
    return median(times)


def decode(name: str, batch: int) -> Row:
    """A decode step's layers."""
    run, shape = LAYERS[name](batch)
    num_bytes = 4 * batch * int(np.prod(shape))
    layers = [randn(batch, *shape, dtype=torch.float32) for _ in range(max(2, min(40, STATE_BYTES // num_bytes)))]
    step = step_of([1] * batch, 100)
    us = graph_us([lambda states=states: run(triton_ops.OPS, torch.bfloat16, states, step) for states in layers])
    return {"what": f"{name} decode {batch}", "us": us, "gb_per_s": 2 * num_bytes / us / 1e3}


def prefill(name: str, length: int) -> Row:
    """A prompt's layer."""
    run, shape = LAYERS[name](length)
    states, step = randn(1, *shape, dtype=torch.float32), step_of([length], 0)
    us = graph_us([lambda: run(triton_ops.OPS, torch.bfloat16, states, step)] * 4)
    return {"what": f"{name} prefill {length}", "us": us, "ns_a_token": 1e3 * us / length}


def convolution(num_tokens: int, each: int) -> Row:
    """The convolution before a gated delta net."""
    channels = sum(HEADS.widths)
    x, weight = randn(num_tokens, channels), randn(channels, 4)
    rows = num_tokens // each
    states, step = randn(rows, 3, channels), step_of([each] * rows, 5)
    us = graph_us([lambda: triton_ops.OPS.causal_conv(x, weight, None, states, step, activate=True)] * 8)
    return {"what": f"convolution {rows} x {each}", "us": us, "gb_per_s": 4 * x.numel() / us / 1e3}


def main() -> None:
    """Check, time, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    todo: list[Callable[[], Row]] = [lambda name=name: check(name) for name in LAYERS]  # type: ignore[misc]
    todo += [lambda name=name, n=n: decode(name, n) for name in LAYERS for n in DECODES]  # type: ignore[misc]
    todo += [lambda name=name, n=n: prefill(name, n) for name in LAYERS for n in PREFILLS]  # type: ignore[misc]
    todo += [lambda n=n, each=each: convolution(n, each) for n, each in ((1, 1), (256, 1), (8192, 8192))]  # type: ignore[misc]
    for run in todo:
        row = run()
        rows.append(row)
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(0), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
