"""Decode step and throughput of one model over several layouts, each against the first.

    python -m benchmarks.parallel --shape llama-8b --layouts 1x1,2x1,4x1,1x2 [--batches 1,32,256] [--out FILE]
    python -m benchmarks.parallel --shape qwen30a3b --even-routing --layouts 2x1,2x1e --prefill 8192

A layout is TP x PP, with an e where ranks hold whole experts; weights are random, on the device. Step time: between two
steps' outputs while `batch` requests decode together; with P stages a step holds about 1/P of them, so compare stages
by tokens/s. `--in-flight 64`: also requests a second, with prompts twice as long, while so many are kept in flight;
`--prefill 8192`: also the best time to one prompt's first token. Without GPUs, `--shape tiny` tries the command. A
layout that fails is reported, and the next one runs.
"""

from __future__ import annotations

import random
import time
import traceback
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from app import LLM, SamplingParams
from benchmarks.offline import arguments, choices_of, make_llm, random_prompt, timed, write

PROMPT, OUTPUT = 512, 128
REQUESTS_EACH = 4
REPEATS = 4  # prompts
FIGURES = ("step_ms_p50", "tokens_per_s", "requests_per_s", "best_ms")


@dataclass(frozen=True, slots=True)
class Loads:
    """What is measured of each layout."""

    batches: list[int]
    in_flight: list[int]
    prefill: list[int]
    prompt: int
    output: int

    @property
    def names(self) -> list[str]:
        """Names of the figures."""
        return [
            *(f"prefill_{length}" for length in self.prefill),
            *(f"batch_{batch}" for batch in self.batches),
            *(f"in_flight_{count}" for count in self.in_flight),
        ]


def decode(llm: LLM, shape: str, batch: int, prompt: int, output: int) -> dict[str, float]:
    """Step time and tokens/s of `batch` requests while all of them decode."""
    rng = random.Random(0)
    prompts = [random_prompt(rng, prompt, shape) for _ in range(batch)]
    params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output, seed=i) for i in range(batch)]
    core = llm._core
    jobs = [choices_of(llm, i, ids, own)[0].request for i, (ids, own) in enumerate(zip(prompts, params, strict=True))]
    for request in jobs:
        core.enqueue(request)
    counts: dict[str, int] = {}
    began, tokens, marks = 0.0, 0, []
    while core.has_work():
        brought = sum(len(out.new_token_ids) for out in core.step())
        for request in jobs:
            counts[request.request_id] = len(request.token_ids) - prompt
        now = time.perf_counter()
        if not began and min(counts.values()) >= 2:
            began = now
        elif began and max(counts.values()) < output - 1:
            tokens += brought
            marks.append(now)
    gaps = [later - earlier for earlier, later in pairwise(marks)]
    seconds = marks[-1] - began if marks else float("nan")
    return {"step_ms_p50": 1e3 * median(gaps) if gaps else float("nan"), "tokens_per_s": tokens / seconds}


def keep_in_flight(llm: LLM, shape: str, count: int, prompt: int, output: int) -> dict[str, float]:
    """Requests a second of four times `count`, `count` of them at a time."""
    rng = random.Random(0)
    core = llm._core
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output)
    waiting = [
        choices_of(llm, i, random_prompt(rng, prompt, shape), params)[0].request for i in range(REQUESTS_EACH * count)
    ]
    begin = time.perf_counter()
    while waiting or core.has_work():
        while waiting and len(core.scheduler.requests) < count:
            core.enqueue(waiting.pop())
        core.step()
    return {"requests_per_s": REQUESTS_EACH * count / (time.perf_counter() - begin)}


def prefill(llm: LLM, shape: str, length: int) -> dict[str, float]:
    """The best time of some prompts, one after the other, each until its first token."""
    rng = random.Random(0)
    return {"best_ms": 1e3 * min(timed(llm, [random_prompt(rng, length, shape)], [1]) for _ in range(REPEATS))}


def sizes(layout: str) -> dict[str, Any]:
    """Engine options of "2x1" or "2x1e"."""
    tp, pp = (int(size) for size in layout.removesuffix("e").split("x"))
    return {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "enable_expert_parallel": layout.endswith("e"),
    }


def measure(shape: str, layout: str, loads: Loads, options: dict[str, Any]) -> Any:
    """All loads of one layout."""
    begin = time.perf_counter()
    with make_llm(shape, **{**sizes(layout), **options}) as llm:
        figures: dict[str, Any] = {"start_s": time.perf_counter() - begin, "notes": llm.worker_info.notes}
        decode(llm, shape, 2, 16, 8)
        lengths = loads.prompt, loads.output
        for length in loads.prefill:
            figures[f"prefill_{length}"] = prefill(llm, shape, length)
        for batch in loads.batches:
            figures[f"batch_{batch}"] = decode(llm, shape, batch, *lengths)
        for count in loads.in_flight:
            figures[f"in_flight_{count}"] = keep_in_flight(llm, shape, count, 2 * lengths[0], lengths[1])
    return figures


def main() -> None:
    """Run the layouts, print, write JSON after each."""
    parser = arguments(__doc__, shape="llama-8b")
    parser.add_argument("--layouts", default="1x1,2x1,4x1,1x2")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--in-flight", default="", help="as --batches")
    parser.add_argument("--prefill", default="", help="lengths of prompts, as --batches")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--output", type=int, default=OUTPUT)
    args = parser.parse_args()
    numbers = ([int(n) for n in text.split(",") if n] for text in (args.batches, args.in_flight, args.prefill))
    loads = Loads(*numbers, args.prompt, args.output)
    results: dict[str, Any] = {}
    for layout in args.layouts.split(","):
        try:
            results[layout] = measure(args.shape, layout, loads, args.engine)
        except Exception as error:
            traceback.print_exc()
            results[layout] = {"error": f"{type(error).__name__}: {error}"}
        base = next(iter(results.values()))
        for name in loads.names:
            own, first = results[layout].get(name), base.get(name)
            if own and first:
                own |= {f"{key}_ratio": value / first[key] for key, value in list(own.items()) if key in FIGURES}
                print(layout, name, {key: round(value, 3) for key, value in own.items()}, flush=True)
        write(args.out, {"shape": args.shape, "layouts": results})


if __name__ == "__main__":
    main()
