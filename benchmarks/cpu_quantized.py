"""Decode on a CPU with weights of few bits beside plain ones: tokens/s at the worker.

    python -m benchmarks.cpu_quantized [--model llama-100m] [--dtype bfloat16] [--forms none int8 w4]
        [--batches 1 8] [--kv-cache-dtypes auto] [--threads N] [--out results/cpu_quantized.json]

A worker for each form, all at once and driven in turns, step by step, so that a slow moment of the machine hits them
alike; the figure is of the fastest step. The weights are random (benchmarks/shapes.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from app.config.engine import EngineConfig
from app.worker.worker import Worker
from benchmarks.cpu_step import CHUNK, Batch
from benchmarks.serve_process import ROOT
from benchmarks.shapes import write_shape

PLAIN = "none"


def started(options: dict[str, Any]) -> tuple[Worker, int, int]:
    """A worker, its blocks and their size."""
    config = EngineConfig(max_num_batched_tokens=CHUNK, max_num_seqs=64, max_model_len=2048, **options)
    worker = Worker(config)
    return worker, worker.start().num_blocks, config.block_size


def in_turns(workers: dict[str, tuple[Worker, int, int]], size: int, context: int, steps: int) -> dict[str, float]:
    """Output tokens/s of each by its fastest step of `size` requests."""
    batches = {name: Batch(*worker, size, context) for name, worker in workers.items()}
    for batch in batches.values():
        batch.prefill()
        batch.decode()
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(steps):
        for name, batch in batches.items():
            seconds[name].append(batch.decode())
    for batch in batches.values():
        batch.leave()
    return {name: size / min(times) for name, times in seconds.items()}


def main() -> None:
    """Measure, print one table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--forms", nargs="+", default=[PLAIN, "int8", "w4"], help="of `quantization`; the first: base")
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["auto"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=64, help="tokens of each request before the first step")
    parser.add_argument("--steps", type=int, default=60, help="of each form and batch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each core")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model": str(write_shape(args.model, Path(folder))), "tokenizer": str(ROOT / "app/assets/tiny-chat"),
            "device": "cpu", "dtype": args.dtype, "num_threads": args.threads, "load_format": "dummy",
        }  # fmt: skip
        workers = {}
        for form, kv in itertools.product(args.forms, args.kv_cache_dtypes):
            quantization = None if form == PLAIN else form
            name = (args.dtype if form == PLAIN else form) + ("" if kv == "auto" else f", {kv} KV")
            workers[name] = started({**options, "quantization": quantization, "kv_cache_dtype": kv})
        rates = {size: in_turns(workers, size, args.context, args.steps) for size in args.batches}
        for worker, _, _ in workers.values():
            worker.shutdown()
    names = list(workers)
    print(f"| {args.model}, {args.threads} thread(s), context {args.context}: tokens/s | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for size, row in rates.items():
        base = row[names[0]]
        cells = [f"{row[name]:,.1f} ({row[name] / base:.2f} x)" for name in names]
        print(f"| batch {size} | " + " | ".join(cells) + " |")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**vars(args), "out": None, "torch": torch.__version__, "rates": rates}))


if __name__ == "__main__":
    main()
