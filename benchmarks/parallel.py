"""Decode step and throughput of one model over several layouts, each against the first.

    python -m benchmarks.parallel --shape llama-8b --layouts 1x1,2x1,4x1,1x2 [--batches 1,32,256] [--out FILE]

A layout is TP x PP; weights are random, on the device. Step time: between two steps' outputs while `batch` requests
decode together; with P stages a step holds about 1/P of them, so compare stages by tokens/s. Without GPUs,
`--shape tiny` tries the command. A layout that fails is reported, and the next one runs.
"""

from __future__ import annotations

import random
import time
import traceback
from itertools import pairwise
from statistics import median
from typing import Any

from app import LLM, SamplingParams
from benchmarks.offline import arguments, make_llm, random_prompt, write

PROMPT, OUTPUT = 512, 128


def decode(llm: LLM, shape: str, batch: int, prompt: int, output: int) -> dict[str, float]:
    """Step time and tokens/s of `batch` requests while all of them decode."""
    rng = random.Random(0)
    prompts = [random_prompt(rng, prompt, shape) for _ in range(batch)]
    params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output, seed=i) for i in range(batch)]
    core = llm._core
    jobs = [llm._job(i, None, ids, own)[0].request for i, (ids, own) in enumerate(zip(prompts, params, strict=True))]
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


def measure(shape: str, layout: str, batches: list[int], options: dict[str, Any], lengths: tuple[int, int]) -> Any:
    """All batches of one layout."""
    tp, pp = (int(size) for size in layout.split("x"))
    begin = time.perf_counter()
    with make_llm(shape, tensor_parallel_size=tp, pipeline_parallel_size=pp, **options) as llm:
        figures: dict[str, Any] = {"start_s": time.perf_counter() - begin, "notes": llm.worker_info.notes}
        decode(llm, shape, 2, 16, 8)
        for batch in batches:
            figures[f"batch_{batch}"] = decode(llm, shape, batch, *lengths)
    return figures


def main() -> None:
    """Run the layouts, print, write JSON after each."""
    parser = arguments(__doc__, shape="llama-8b")
    parser.add_argument("--layouts", default="1x1,2x1,4x1,1x2")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--output", type=int, default=OUTPUT)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    results: dict[str, Any] = {}
    for layout in args.layouts.split(","):
        try:
            results[layout] = measure(args.shape, layout, batches, args.engine, (args.prompt, args.output))
        except Exception as error:
            traceback.print_exc()
            results[layout] = {"error": f"{type(error).__name__}: {error}"}
        base = next(iter(results.values()))
        for batch in batches:
            own, first = results[layout].get(f"batch_{batch}"), base.get(f"batch_{batch}")
            if own and first:
                own["step_ratio"] = own["step_ms_p50"] / first["step_ms_p50"]
                own["throughput_ratio"] = own["tokens_per_s"] / first["tokens_per_s"]
                print(layout, f"batch {batch:4d}", {name: round(value, 3) for name, value in own.items()}, flush=True)
        write(args.out, {"shape": args.shape, "layouts": results})


if __name__ == "__main__":
    main()
