"""Time of one prompt and its first token on random weights, beside its floor.

    python -m benchmarks.prefill --shape qwen3-0.6b [--lengths 2048 8192] [--out results/prefill.json]

The best of four, as vLLM's figures in RESULTS.md; a prompt longer than max_num_batched_tokens comes in chunks. What a
server captures while it idles is captured before.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from app import LLM
from benchmarks.offline import arguments, idle, make_llm, random_prompt, timed, watched_steps, write
from benchmarks.roofline import Floor


def measure(llm: LLM, shape: str, length: int, repeats: int) -> dict[str, float]:
    """One row: ms of the best run, and of the device."""
    rng = random.Random(0)
    prompts = [random_prompt(rng, length, shape) for _ in range(repeats + 1)]
    timed(llm, prompts[:1], [1])
    with watched_steps() as watch:
        best = min(timed(llm, [prompt], [1]) for prompt in prompts[1:])
    floor = Floor.of(shape, llm.config.kv_cache_dtype).prefill_s(length)
    return {
        "best_ms": 1e3 * best,
        "device_ms": 1e3 * median(watch.device),
        "floor_ms": 1e3 * floor,
        "roofline_fraction": floor / best,
        "tokens_per_s": length / best,
    }


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape, "prefill": {}}
    with make_llm(args.shape, **{"cuda_graph_prompt_tokens": "auto", **args.engine}) as llm:
        idle(llm)
        for length in args.lengths:
            figures["prefill"][str(length)] = row = measure(llm, args.shape, length, args.repeats)
            print(f"{args.shape} prefill {length}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
            write(args.out, figures)


if __name__ == "__main__":
    main()
