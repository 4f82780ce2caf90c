"""What `deterministic` costs: steps with it and without it.

    python -m benchmarks.exact_step [--model llama-100m] [--dtypes bfloat16 float32] [--rounds 5]
    python -m benchmarks.exact_step --gpu [--model llama-8b] [--batches 1 32 256] [--lengths 2048 8192] [--ways off ...]

On a CPU two workers of one model step in turns, on one thread; figures are the least of all rounds, as other jobs on
the machine only ever add. On a GPU an engine of each way runs after the other, as in benchmarks.latency and
benchmarks.prefill, one worker each. Weights are random (benchmarks/shapes.py).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from app.config.engine import EngineConfig
from app.worker.worker import Worker
from benchmarks import latency, prefill
from benchmarks.cpu_step import CHUNK, Batch
from benchmarks.offline import make_llm
from benchmarks.shapes import write_shape

WAYS = ("off", "batch", "batch_and_layout")
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


def on_gpu(shape: str, batches: list[int], lengths: list[int], steps: int, ways: list[str]) -> None:
    """Print a table of an engine's steps."""
    found: dict[str, list[float]] = {}
    for way in ways:
        with make_llm(shape, dtype="bfloat16", deterministic=way) as llm:
            print(*llm.worker_info.notes, sep="\n", flush=True)
            for batch in batches:
                row = latency.measure(llm, shape, batch, steps=steps)
                found.setdefault(f"decode step, {batch} x {latency.CONTEXT}", []).append(row["step_ms"])
                found.setdefault(f"decode step on the device, {batch}", []).append(row["device_ms"])
                print(f"{way}, {batch}: {row['step_ms']:.2f} ms, on the device {row['device_ms']:.2f}", flush=True)
            for length in lengths:
                row = prefill.measure(llm, shape, length, repeats=4)
                found.setdefault(f"prefill of {length}", []).append(row["best_ms"])
                print(f"{way}, prefill of {length}: {row['best_ms']:.2f} ms", flush=True)
    print(head(f"{shape}, bfloat16", ways))
    for name, ms in found.items():
        print(line(name, ms), flush=True)


def head(what: str, ways: list[str]) -> str:
    """The table's head: each way's milliseconds, and its share of the first one's."""
    ratios = "".join(f" {way}, ms | ratio |" for way in ways[1:])
    return f"| {what} | {ways[0]}, ms |{ratios}\n|---|---|{'---|---|' * len(ways[1:])}"


def line(name: str, ms: list[float]) -> str:
    """A line of the table."""
    return f"| {name} | {ms[0]:.2f} |" + "".join(f" {one:.2f} | {one / ms[0]:.3f} |" for one in ms[1:])


def main() -> None:
    """Print a table for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["off", "batch"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--steps", type=int, default=latency.STEPS)
    parser.add_argument("--model")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.gpu:
        on_gpu(args.model or "llama-8b", args.batches, args.lengths, args.steps, args.ways)
        return
    model = args.model or "llama-100m"
    with tempfile.TemporaryDirectory() as folder:
        directory = write_shape(model, Path(folder))
        for dtype in args.dtypes:
            workers = [start(directory, dtype, way) for way in args.ways]
            print(head(f"{model}, {dtype}", args.ways))
            for size, context in CASES:
                rounds = [[seconds(worker, size, context) for worker in workers] for _ in range(args.rounds)]
                for number, name in enumerate(("prefill", "decode step")):
                    least = [1e3 * min(one[way][number] for one in rounds) for way in range(len(workers))]
                    print(line(f"{name}, {size} x {context}", least), flush=True)
            for worker in workers:
                worker.shutdown()


if __name__ == "__main__":
    main()
