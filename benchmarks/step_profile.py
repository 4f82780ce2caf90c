"""Where the time of a decode step goes on a GPU: kernels of a run on random weights, by name.

    python -m benchmarks.step_profile --shape llama-8b [--batches 1 32 256] [--out results/profile.json]

Microseconds and launches are those of one step, the sum over its layers; `gaps` is the wall time of a step less its
kernels'. Taken by torch's profiler, which slows the host a little, not the kernels.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app import LLM
from benchmarks.offline import arguments, make_llm, random_prompt, timed, write

CONTEXT, STEPS, SHOWN = 512, 32, 18


def kernels_of_a_step(run: Callable[[int], Any]) -> dict[str, Any]:
    """Name -> (microseconds, launches) of one step, and the step's wall time; `run` lets requests have so many
    tokens."""
    run(2)
    totals: list[dict[str, tuple[float, int]]] = []
    walls = []
    for length in (2, STEPS + 2):  # their difference has no prefill in it
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            begin = time.perf_counter()
            run(length)
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - begin)
        found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for event in watched.key_averages():
            found[event.key] = (float(event.self_device_time_total), int(event.count))
        totals.append(found)
    names = {name for name in totals[1] if totals[1][name][0] > 0}
    table = {
        name: ((totals[1][name][0] - totals[0][name][0]) / STEPS, (totals[1][name][1] - totals[0][name][1]) / STEPS)
        for name in names
    }
    step_us = 1e6 * (walls[1] - walls[0]) / STEPS
    busy_us = sum(us for us, _ in table.values())
    ranked = sorted(table.items(), key=lambda item: -item[1][0])
    return {"step_us": step_us, "kernels_us": busy_us, "gaps_us": step_us - busy_us, "kernels": ranked}


def show(title: str, row: dict[str, Any]) -> None:
    """Print one step's kernels."""
    launches = sum(count for _, (_, count) in row["kernels"])
    print(
        f"-- {title}: step {row['step_us']:.0f} us, kernels {row['kernels_us']:.0f} us in {launches:.0f} launches, "
        f"gaps {row['gaps_us']:.0f} us"
    )
    for name, (us, count) in row["kernels"][:SHOWN]:
        print(f"   {us:8.1f} us {count:6.1f} x {us / max(count, 1e-9):7.2f}  {name[:100]}")
    print(end="", flush=True)


def main() -> None:
    """Profile, print, write JSON."""
    parser = arguments(__doc__, "llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape}
    with make_llm(args.shape, **args.engine) as llm:
        for batch in args.batches:
            rng = random.Random(0)
            prompts = [random_prompt(rng, CONTEXT, args.shape) for _ in range(batch)]
            figures[str(batch)] = row = kernels_of_a_step(partial(_run, llm, prompts))
            show(f"{args.shape} batch {batch}", row)
            write(args.out, figures)


def _run(llm: LLM, prompts: list[list[int]], length: int) -> None:
    timed(llm, prompts, [length] * len(prompts))


if __name__ == "__main__":
    main()
