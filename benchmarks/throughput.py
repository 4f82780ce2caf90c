"""Offline throughput of the engine on random weights, beside its floor.

    python -m benchmarks.throughput --shape qwen3-0.6b [--requests 256] [--uniform 0] [--out results/throughput.json]

256 requests, in and out uniform 100-1024: the workload is nano-vllm's and the one of the vLLM figures in RESULTS.md;
lengths from `random.Random(0)`, drawn (in, out) in turn, `ignore_eos`, temperature 1. Then `--uniform` requests of
1,024 tokens in and 128 out, all at once.
"""

from __future__ import annotations

import random
from typing import Any

from app import LLM
from benchmarks.offline import arguments, make_llm, random_prompt, timed, watched_steps, write
from benchmarks.roofline import Floor


def mixed(llm: LLM, shape: str, requests: int, longest: int = 1024, repeats: int = 1) -> dict[str, float]:
    """Output tokens/s of requests with in and out uniform up to `longest`; the best of `repeats`."""
    rng = random.Random(0)
    shortest = min(100, longest)
    pairs = [(rng.randint(shortest, longest), rng.randint(shortest, longest)) for _ in range(requests)]
    prompts = [random_prompt(rng, length, shape) for length, _ in pairs]
    timed(llm, prompts[:4], [8] * min(4, requests))
    runs = []
    for _ in range(repeats):
        with watched_steps() as watch:
            runs.append((timed(llm, prompts, [length for _, length in pairs]), watch))
    seconds, watch = min(runs, key=lambda run: run[0])
    floor = Floor.of(shape, llm.config.kv_cache_dtype).batch_s(pairs)
    return {
        "output_tokens_per_s": sum(length for _, length in pairs) / seconds,
        "floor_tokens_per_s": sum(length for _, length in pairs) / floor,
        "roofline_fraction": floor / seconds,
        "gpu_busy": watch.gpu_busy(seconds),
        "schedule_us": watch.p50_us("schedule"),
        "update_us": watch.p50_us("update"),
        "inputs_us": watch.p50_us("inputs"),
        "execute_us": watch.p50_us("execute"),
    }


def uniform(llm: LLM, shape: str, requests: int, prompt: int = 1024, output: int = 128) -> dict[str, float]:
    """Requests/s and tokens/s of requests of one size."""
    rng = random.Random(0)
    prompts = [random_prompt(rng, prompt, shape) for _ in range(requests)]
    seconds = timed(llm, prompts, [output] * requests)
    return {"requests_per_s": requests / seconds, "total_tokens_per_s": requests * (prompt + output) / seconds}


def main() -> None:
    """Run the workloads, print, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024, help="most tokens in and out of the mixed requests")
    parser.add_argument("--uniform", type=int, default=1000, help="requests of 1,024 in and 128 out; 0: leave out")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape, "requests": args.requests}
    with make_llm(args.shape, **args.engine) as llm:
        print(*llm.worker_info.notes, sep="\n", flush=True)
        figures["mixed"] = mixed(llm, args.shape, args.requests, args.longest, args.repeats)
        write(args.out, figures)
        if args.uniform:
            figures["uniform"] = uniform(llm, args.shape, args.uniform)
    for name in ("mixed", "uniform"):
        if name in figures:
            print(f"{args.shape} {name}: " + ", ".join(f"{k} {v:,.4g}" for k, v in figures[name].items()))
    write(args.out, figures)


if __name__ == "__main__":
    main()
