"""Models whose layers keep states, part by part: steps on random weights beside what the device allows.

    python -m benchmarks.states --shape qwen3.5-4b [--batches 1 8 32 128 256] [--lengths 2048 8192 32768] [--shown 15]

One process, no Ray, CUDA graphs as in service. `device`: the median time of a decode step on the GPU behind prompts of
512 tokens, and of a prompt's steps together; `step`: the same by the wall; parts: the sum of its kernels, by torch's
profiler over further steps of the same run. `floor` (benchmarks/roofline.py): weights of the experts that even routing
reads and all others, states read and written, keys and values; with experts, run with --even-routing.
"""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app import LLM
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.worker.worker import Worker
from benchmarks.latency import CONTEXT
from benchmarks.offline import arguments, make_llm, random_prompt, timed, write
from benchmarks.roofline import Floor

WARM, STEPS, PROFILED = 4, 32, 12  # decode steps of a run, one part behind the other
AHEAD = 32  # steps in which the first requests decode while the last ones' prompts are computed
# Parts by names of kernels, the first that fits.
PARTS = {
    "states": r"delta_|space_|selective_scan|causal_conv|leave_inputs|gated_norm",
    "experts": r"expert|gate_kernel|route|moe|sort|scan_product|down_sum|sum_rows|place_pairs|wide_product|wide_fp8",
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


class DecodeSteps:
    """Times STEPS decode steps of a run, all of whose requests are in them, and profiles PROFILED later ones."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._seen = 0
        self._device_s: list[float] = []  # of each step, as the worker saw it
        self._begin = self._wall_s = 0.0
        self._profile = profile(activities=[ProfilerActivity.CUDA]) if torch.cuda.is_available() else None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the engine of this process."""
        execute = Worker.execute

        def watched(worker: Worker, step: SchedulerOutput) -> list[ModelRunnerOutput]:
            if len(step.rows) == step.num_tokens == self._batch:
                self._begin_step()
            outputs = execute(worker, step)
            if self._begin and not self._wall_s:
                self._device_s += [output.step_time_s for output in outputs]
            return outputs

        Worker.execute = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            Worker.execute = execute  # type: ignore[method-assign]

    def _begin_step(self) -> None:
        self._seen += 1
        if self._seen == WARM:
            self._begin = time.perf_counter()
        elif self._seen == WARM + STEPS:
            self._wall_s = time.perf_counter() - self._begin
        if self._profile is not None and self._seen in (WARM + STEPS, WARM + STEPS + PROFILED):
            torch.cuda.synchronize()
            if self._seen == WARM + STEPS:
                self._profile.start()
            else:
                self._profile.stop()

    def times_ms(self) -> dict[str, float]:
        """Those of one step."""
        assert self._seen >= WARM + STEPS + PROFILED, f"{self._seen} steps held all {self._batch} requests"
        return {"device_ms": 1e3 * median(self._device_s), "step_ms": 1e3 * self._wall_s / STEPS}

    def kernels(self) -> Kernels:
        """Those of one step, the longest first."""
        return kernels_of(self._profile, PROFILED)


def kernels_of(watched: profile | None, steps: int = 1) -> Kernels:
    """What a profile saw in so many steps, the longest first; nothing where there is no GPU."""
    events = [] if watched is None else watched.key_averages()
    found = [(str(e.key), (float(e.self_device_time_total) / steps, float(e.count) / steps)) for e in events]
    return sorted(found, key=lambda item: -item[1][0])


@contextmanager
def summed_steps() -> Iterator[list[float]]:
    """Times of all steps of this process's engine on its device, of those that sample nothing, too, in seconds."""
    found: list[float] = []
    execute = Worker.execute

    def watched(worker: Worker, step: SchedulerOutput) -> list[ModelRunnerOutput]:
        outputs = execute(worker, step)
        found.extend(output.step_time_s for output in outputs)
        return outputs

    Worker.execute = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Worker.execute = execute  # type: ignore[method-assign]


def kernels_of_a_prompt(llm: LLM, shape: str, length: int) -> tuple[Kernels, float]:
    """Those of one prompt, the longest first, and the time of its steps, in ms."""
    rng = random.Random(0)
    timed(llm, [random_prompt(rng, length, shape)], [1])
    times = []
    for _ in range(2):
        with summed_steps() as steps:
            timed(llm, [random_prompt(rng, length, shape)], [1])
        times.append(1e3 * sum(steps))
    if not torch.cuda.is_available():
        return [], min(times)
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        timed(llm, [random_prompt(rng, length, shape)], [1])
        torch.cuda.synchronize()
    return kernels_of(watched), min(times)


def shown(title: str, row: dict[str, Any], kernels: Kernels, count: int) -> None:
    """Print a row, and its longest kernels."""
    print(f"-- {title}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    for name, (us, launches) in kernels[:count]:
        if us > 0:
            print(f"   {us:9.1f} us {launches:6.1f} x {us / max(launches, 1e-9):8.2f}  {part_of(name):9s} {name[:90]}")
    print(end="", flush=True)


def decode(llm: LLM, shape: str, batch: int, count: int) -> dict[str, Any]:
    """One decode step."""
    rng = random.Random(0)
    timed(llm, [random_prompt(rng, 16, shape) for _ in range(batch)], [2] * batch)
    steps, floor = DecodeSteps(batch), Floor.of(shape, llm.config.kv_cache_dtype)
    with steps.watch():
        prompts = [random_prompt(rng, CONTEXT, shape) for _ in range(batch)]
        timed(llm, prompts, [WARM + STEPS + PROFILED + AHEAD] * batch)
    kernels, context = steps.kernels(), CONTEXT + WARM + STEPS / 2
    times, floor_ms = steps.times_ms(), 1e3 * floor.decode_s(batch, context)
    row = {**times, "floor_ms": floor_ms, "times_floor": times["device_ms"] / floor_ms, **parts_ms(kernels)}
    row |= {f"floor_{name}": 1e3 * s for name, s in floor.decode_parts_s(batch, context).items()}
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
