"""What `deterministic: batch` costs on a CPU: steps of two workers of one model, with it and without it, in turns.

    python -m benchmarks.exact_step [--model llama-100m] [--dtypes bfloat16 float32] [--rounds 5]

Figures are the least of all rounds, as other jobs on the machine only ever add; weights are random
(benchmarks/shapes.py), one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from app.config.engine import EngineConfig
from app.worker.worker import Worker
from benchmarks.cpu_step import CHUNK, Batch
from benchmarks.shapes import write_shape

WAYS = ("off", "batch")
CASES = ((1, 250), (8, 250), (32, 250))  # requests, their context; then a decode step, or the prefill of all
STEPS = 3
NUM_BLOCKS = 1000


def start(directory: Path, dtype: str, deterministic: str) -> Worker:
    """A worker that is ready for its first step."""
    config = EngineConfig(
        model=str(directory), load_format="dummy", device="cpu", dtype=dtype, num_threads=1, num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=CHUNK, max_num_seqs=64, max_model_len=2048, executor="in_process",
        deterministic=deterministic,
    )  # fmt: skip
    worker = Worker(config)
    worker.start()
    return worker


def seconds(worker: Worker, size: int, context: int) -> tuple[float, float]:
    """Returns those of the prefill, and of the quickest of its decode steps."""
    batch = Batch(worker, NUM_BLOCKS, EngineConfig().block_size, size, context)
    prefill, decode = batch.prefill(), min(batch.decode() for _ in range(STEPS))
    batch.leave()
    return prefill, decode


def main() -> None:
    """Print a table for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_shape(args.model, Path(folder))
        for dtype in args.dtypes:
            workers = [start(directory, dtype, way) for way in WAYS]
            print(f"| {args.model}, {dtype} | off, ms | batch, ms | ratio |\n|---|---|---|---|")
            for size, context in CASES:
                rounds = [[seconds(worker, size, context) for worker in workers] for _ in range(args.rounds)]
                for number, name in enumerate(("prefill", "decode step")):
                    off, exact = (1e3 * min(one[way][number] for one in rounds) for way in range(len(WAYS)))
                    print(f"| {name}, {size} x {context} | {off:.1f} | {exact:.1f} | {exact / off:.2f} |", flush=True)
            for worker in workers:
                worker.shutdown()


if __name__ == "__main__":
    main()
