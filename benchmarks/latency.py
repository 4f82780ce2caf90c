"""Decode step time of the engine on random weights, beside its floor.

    python -m benchmarks.latency --shape qwen3-0.6b [--batches 1 8 32 128 256] [--eager] [--out results/latency.json]

A step's time is that of vLLM's figures in RESULTS.md: prompts of 512 tokens with 129 output tokens, less the same with
one, over 128; so it holds everything that a token costs, detokenisation included. `device` is the median time between
the first and the last event of a step on the GPU, `busy` the share of the wall in which it was inside a step; host
columns are medians of a call. `--eager` adds the same without CUDA graphs.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from app import LLM
from app.worker.graphs.prompts_as_used import USES
from benchmarks.offline import arguments, make_llm, random_prompt, timed, watched_steps, write
from benchmarks.roofline import Floor

CONTEXT, STEPS = 512, 128


def measure(llm: LLM, shape: str, batch: int, context: int = CONTEXT, steps: int = STEPS) -> dict[str, float]:
    """One row of the table; seconds become ms and us."""
    rng = random.Random(0)
    prompts = [random_prompt(rng, context, shape) for _ in range(batch)]
    for _ in range(USES):  # whose like is captured as a graph by then
        timed(llm, prompts, [2] * batch)
    short = timed(llm, prompts, [1] * batch)
    with watched_steps() as watch:
        long = timed(llm, prompts, [steps + 1] * batch)
    step = (long - short) / steps
    floor = Floor.of(shape, llm.config.kv_cache_dtype).decode_s(batch, context + steps / 2)
    return {
        "step_ms": 1e3 * step,
        "floor_ms": 1e3 * floor,
        "roofline_fraction": floor / step,
        "device_ms": 1e3 * median(watch.device),
        "gpu_busy": watch.gpu_busy(long),
        "kernel_eff": floor / median(watch.device),
        "schedule_us": watch.p50_us("schedule"),
        "update_us": watch.p50_us("update"),
        "inputs_us": watch.p50_us("inputs"),
        "execute_us": watch.p50_us("execute"),
    }


def run(shape: str, batches: list[int], engine: dict[str, Any], context: int, steps: int) -> dict[str, Any]:
    """All batch sizes on one engine."""
    with make_llm(shape, **engine) as llm:
        print(*llm.worker_info.notes, sep="\n", flush=True)
        rows = {}
        for batch in batches:
            rows[str(batch)] = row = measure(llm, shape, batch, context, steps)
            print(
                f"{shape} batch {batch}: " + ", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True
            )
    return rows


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eager", action="store_true", help="measure without CUDA graphs too")
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape, "context": args.context}
    for name, options in (("graphs", {}), ("eager", {"cuda_graphs": "off"})):
        if name == "graphs" or args.eager:
            print(f"-- {name}")
            options = {**args.engine, **options}
            figures[name] = run(args.shape, args.batches, options, args.context, args.steps)
            write(args.out, figures)


if __name__ == "__main__":
    main()
