"""Decode steps of a model larger than the device (`cpu_offload_gb`), against what the bus allows.

    python -m benchmarks.offload --shape llama-70b --gb 28 [--batches 1 32] [--out results/offload.json]

Every step copies the weights that stay in host memory, so it takes at least their bytes over the bus's rate, which is
measured first: the same pinned memory, one long copy. `overlap` is that time over the step's: 1 where all else that a
step does is hidden behind the copies. `resident_ms` is what the step would take if memory held all weights.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from app import LLM
from app.platforms import platform_of
from benchmarks import latency
from benchmarks.offline import arguments, make_llm, write
from benchmarks.roofline import Floor
from benchmarks.shapes import SHAPES

PROBE_BYTES, REPEATS = 1 << 30, 8


def bus_rate(device: torch.device) -> float:
    """Bytes a second from pinned host memory to the device."""
    platform = platform_of(device)
    host, target = (torch.empty(PROBE_BYTES, dtype=torch.uint8, device=place) for place in ("cpu", device))
    platform.pin(host.zero_())
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    rate = REPEATS * PROBE_BYTES / (time.perf_counter() - began)
    platform.unpin(host)
    return rate


def measure(llm: LLM, shape: str, batch: int, offloaded: int, rate: float, steps: int) -> dict[str, float]:
    """One row of the table."""
    row = latency.measure(llm, shape, batch, context=128, steps=steps)
    least_ms = 1e3 * offloaded / rate
    return {
        "step_ms": row["step_ms"],
        "bus_ms": least_ms,
        "overlap": least_ms / row["step_ms"],
        "resident_ms": 1e3 * Floor.of(shape).decode_s(batch, 128 + steps / 2),
        "tokens_per_s": 1e3 * batch / row["step_ms"],
    }


def offloaded_bytes(notes: list[str], layer_bytes: int) -> int:
    """What the engine says that it keeps in host memory."""
    (note,) = [note for note in notes if note.startswith("weights in host memory: ")]
    return int(note.split()[4]) * layer_bytes


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--gb", type=float, default=28.0, help="cpu_offload_gb; 28 GiB are 30 GB")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    rate = bus_rate(torch.device("cuda", 0))
    torch.cuda.empty_cache()
    engine: dict[str, Any] = {
        "max_num_seqs": max(args.batches), "max_model_len": 1024, "gpu_memory_utilization": 0.95,
        "cuda_graph_sizes": args.batches, "cpu_offload_gb": args.gb, **args.engine,
    }  # fmt: skip
    figures: dict[str, Any] = {"shape": args.shape, "bus_gb_s": rate / 1e9, "rows": {}}
    with make_llm(args.shape, **engine) as llm:
        print(*llm.worker_info.notes, sep="\n", flush=True)
        layer = Floor.of(args.shape).layer_weights * 2 // SHAPES[args.shape]["num_hidden_layers"]
        offloaded = offloaded_bytes(llm.worker_info.notes, layer)
        figures["offloaded_gb"] = offloaded / 1e9
        print(f"{offloaded / 1e9:.1f} GB in host memory, the bus does {rate / 1e9:.1f} GB/s")
        for batch in args.batches:
            figures["rows"][str(batch)] = row = measure(llm, args.shape, batch, offloaded, rate, args.steps)
            print(f"batch {batch}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    write(args.out, figures)


if __name__ == "__main__":
    main()
