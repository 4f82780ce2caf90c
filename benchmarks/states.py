"""Models whose layers keep states, part by part: steps on random weights beside what the device allows.

    python -m benchmarks.states --shape qwen3.5-4b [--batches 1 8 32 128 256] [--lengths 2048 8192 32768] [--shown 15]

One process, no Ray, CUDA graphs as in service. `device`: the median time of a decode step on the GPU after prompts of
512 tokens, and of a prompt's steps together; `kernels`: the same as the sum of its kernels, by torch's profiler, and
which parts of the model they belong to. `floor` (benchmarks/roofline.py): weights of the experts that even routing
reads and all others, states read and written, keys and values; with experts, run with --even-routing.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app import LLM
from benchmarks.latency import CONTEXT
from benchmarks.latency import measure as measure_step
from benchmarks.offline import arguments, make_llm, random_prompt, timed, watched_steps, write
from benchmarks.roofline import Floor
from benchmarks.step_profile import kernels_of_a_step

STEPS = 32
# Parts by names of kernels, the first that fits.
PARTS = {
    "states": r"delta_|space_|selective_scan|causal_conv|leave_inputs|gated_norm",
    "experts": r"expert|gate_top|route|moe|sort",
    "products": r"nvjet|gemm|cutlass|linear|splitK|cublas|gemv",
    "attention": r"attend|attention|prefill|decode_kernel|split|write_kv|rotat|rope",
    "sampling": r"gumbel|sample|penal|logit|read_kernel|draw_kernel|count_kernel",
}
Kernels = list[tuple[str, tuple[float, float]]]  # name, (us, launches)


def part_of(name: str) -> str:
    """The part of a model that a kernel belongs to."""
    return next((part for part, names in PARTS.items() if re.search(names, name)), "other")


def parts_ms(kernels: Kernels) -> dict[str, float]:
    """Time of each part."""
    found: dict[str, float] = defaultdict(float)
    for name, (us, _) in kernels:
        found[part_of(name)] += us / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def kernels_of_a_prompt(llm: LLM, shape: str, length: int) -> tuple[Kernels, float]:
    """Those of one prompt, the longest first, and the time of its steps, in ms."""
    rng = random.Random(0)
    for _ in range(2):
        timed(llm, [random_prompt(rng, length, shape)], [1])
    with watched_steps() as watch:
        timed(llm, [random_prompt(rng, length, shape)], [1])
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        timed(llm, [random_prompt(rng, length, shape)], [1])
        torch.cuda.synchronize()
    found = [(str(e.key), (float(e.self_device_time_total), float(e.count))) for e in watched.key_averages()]
    return sorted(found, key=lambda item: -item[1][0]), 1e3 * sum(watch.device)


def shown(title: str, row: dict[str, Any], kernels: Kernels, count: int) -> None:
    """Print a row, and its longest kernels."""
    print(f"-- {title}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    for name, (us, launches) in kernels[:count]:
        if us > 0:
            print(f"   {us:9.1f} us {launches:6.1f} x {us / max(launches, 1e-9):8.2f}  {part_of(name):9s} {name[:90]}")
    print(end="", flush=True)


def decode(llm: LLM, shape: str, batch: int, count: int) -> dict[str, Any]:
    """One decode step."""
    step, floor = measure_step(llm, shape, batch, CONTEXT, STEPS), Floor.of(shape, llm.config.kv_cache_dtype)
    kernels = kernels_of_a_step(llm, shape, batch)["kernels"]
    row = {"device_ms": step["device_ms"], "step_ms": step["step_ms"], "floor_ms": step["floor_ms"]}
    row |= {"times_floor": step["device_ms"] / step["floor_ms"], **parts_ms(kernels)}
    row |= {f"floor_{name}": 1e3 * s for name, s in floor.decode_parts_s(batch, CONTEXT + STEPS / 2).items()}
    shown(f"{shape} decode {batch}", row, kernels, count)
    return row


def prefill(llm: LLM, shape: str, length: int, count: int) -> dict[str, Any]:
    """One prompt and its first token."""
    kernels, device_ms = kernels_of_a_prompt(llm, shape, length)
    floor_ms = 1e3 * Floor.of(shape, llm.config.kv_cache_dtype).prefill_s(length)
    row = {"device_ms": device_ms, "floor_ms": floor_ms, "times_floor": device_ms / floor_ms, **parts_ms(kernels)}
    shown(f"{shape} prefill {length}", row, kernels, count)
    return row


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, "qwen3.5-4b")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--shown", type=int, default=15, help="kernels of each")
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape, "decode": {}, "prefill": {}}
    options = {"max_model_len": max([CONTEXT + 512, *(length + 16 for length in args.lengths)]), **args.engine}
    with make_llm(args.shape, **options) as llm:
        for batch in args.batches:
            figures["decode"][str(batch)] = decode(llm, args.shape, batch, args.shown)
            write(args.out, figures)
        for length in args.lengths:
            figures["prefill"][str(length)] = prefill(llm, args.shape, length, args.shown)
            write(args.out, figures)


if __name__ == "__main__":
    main()
