"""What carrying a step costs: the same decode steps over every executor and transport, one step in flight.

    python -m benchmarks.transports --shape qwen3-0.6b [--ranks 1 2] [--batch 64] [--one-gpu] [--out FILE]

Random weights. `host` is the median time between two steps' outputs less the device's own time of a step: scheduling,
carrying the step message there, enqueueing and carrying the tokens back. `carried` is how much more that is than for
the first way of so many ranks (in this process; of several ranks: over sockets of local processes). With steps in
flight, as engines run, it is hidden behind the device. `--one-gpu`: several ranks share the first GPU
(benchmarks/one_gpu.py). `--shape tiny --engine '{"device":"cpu"}'` tries it where there is no GPU.
"""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from statistics import median
from typing import Any

import ray

from app import LLM, SamplingParams
from benchmarks.offline import arguments, choices_of, make_llm, random_prompt, write
from benchmarks.one_gpu import worker_groups_on_one_gpu
from benchmarks.serve_process import ROOT

SEVERAL = [("local_processes", "socket"), ("ray_workers", "socket"), ("ray_workers", "compiled_graph")]
WAYS = {1: [("in_process", "auto"), *SEVERAL], 2: SEVERAL, 4: SEVERAL}
PROMPT = 64


def step_times(llm: LLM, shape: str, batch: int, steps: int) -> dict[str, float]:
    """Median us of a step in which the whole batch decodes, and of the device in it."""
    core, rng = llm._core, random.Random(0)
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=steps + 4)
    jobs = [choices_of(llm, i, random_prompt(rng, PROMPT, shape), params)[0].request for i in range(batch)]
    device: list[float] = []
    collect = core.executor.collect

    def watched() -> Any:
        outputs = collect()
        device.extend(output.step_time_s for output in outputs if len(output.sampled_token_ids))
        return outputs

    core.executor.collect = watched  # type: ignore[method-assign]
    for request in jobs:
        core.enqueue(request)
    marks = []
    while core.has_work():
        if len(core.step()) == batch:
            marks.append(time.perf_counter())
    core.executor.collect = collect  # type: ignore[method-assign]
    wall, own = 1e6 * median(b - a for a, b in pairwise(marks)), 1e6 * median(device)
    return {"step_us": wall, "device_us": own, "host_us": wall - own}


def main() -> None:
    """Measure every way, print, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(WAYS), default=[1])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--one-gpu", action="store_true")
    args = parser.parse_args()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_gpus=max(args.ranks) if args.one_gpu else None,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    figures: dict[str, Any] = {"shape": args.shape, "batch": args.batch}
    for ranks in args.ranks:
        least = None
        for executor, transport in WAYS[ranks]:
            options = {"executor": executor, "step_transport": transport, "tensor_parallel_size": ranks}
            options |= {"max_inflight_steps": 1, **args.engine}
            with worker_groups_on_one_gpu(args.one_gpu and ranks > 1), make_llm(args.shape, **options) as llm:
                step_times(llm, args.shape, args.batch, 8)
                row = step_times(llm, args.shape, args.batch, args.steps)
            least = row["host_us"] if least is None else least
            row["carried_us"] = row["host_us"] - least
            name = f"{ranks} x {executor} {transport}"
            figures[name] = row
            print(f"{name:34s}", {key: round(value) for key, value in row.items()}, flush=True)
            write(args.out, figures)


if __name__ == "__main__":
    main()
