"""What experts that move cost the steps beside which they move: gaps between outputs of decode steps, quiet and moving.

    python -m benchmarks.eplb --shape qwen30a3b [--ranks 2] [--batch 32] [--steps 1200] [--out FILE]

Random weights route unevenly enough for experts to move. Each prompt comes back at the end, when all has moved: its
tokens are compared with those of the beginning (in bf16 a sum over ranks in another order may tip a near tie: counted).
`--engine '{"device":"cpu"}' --shape tiny-moe --redundant 1` tries the command.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from app import LLM, SamplingParams
from app.heap import settle_heap
from benchmarks.offline import arguments, choices_of, make_llm, random_prompt, write

NEAR = 3  # steps in flight: the outputs that say of a move are those of this many later gaps at most
WARM_UP = 50  # steps


def gaps_of(llm: LLM, shape: str, batch: int, steps: int) -> tuple[list[float], list[int]]:
    """Milliseconds between steps' outputs while `batch` requests decode, and experts moved until each."""
    rng, core = random.Random(0), llm._core
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=steps)
    for i in range(batch):
        core.enqueue(choices_of(llm, i, random_prompt(rng, 32, shape), params)[0].request)
    gaps, moved = [], []
    last = time.perf_counter()
    while core.has_work():
        core.step()
        now = time.perf_counter()
        gaps.append(1e3 * (now - last))
        moved.append(core.stats().figures["experts_moved"])
        last = time.perf_counter()
    return gaps, moved


def summary(gaps: Any) -> dict[str, float]:
    """Percentiles of some gaps."""
    if not len(gaps):
        return {"steps": 0}
    p50, p99 = np.percentile(gaps, (50, 99))
    return {"steps": len(gaps), "p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(np.max(gaps))}


def measure(llm: LLM, shape: str, batch: int, steps: int) -> dict[str, Any]:
    """Gaps of steps beside which experts move, and of the others."""
    gaps, moved = (np.asarray(one[WARM_UP:-1]) for one in gaps_of(llm, shape, batch, steps))
    begins = np.flatnonzero(np.diff(moved, prepend=moved[0]))
    is_moving = np.zeros(len(gaps), dtype=bool)
    for begin in begins:
        is_moving[max(0, begin - NEAR) : begin + 2 * NEAR + 16] = True  # to the swap
    quiet, moving = summary(gaps[~is_moving]), summary(gaps[is_moving])
    found: dict[str, Any] = {"quiet": quiet, "moving": moving, "moves": len(begins), "experts_moved": int(moved[-1])}
    if quiet["steps"] and moving["steps"]:
        found["longest_stop_ms"] = moving["max_ms"] - quiet["p50_ms"]
        found["largest_ms"] = sorted((round(float(gap), 2) for gap in gaps), reverse=True)[:8]
    return found


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, shape="qwen30a3b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--redundant", type=int, default=16)
    args = parser.parse_args()
    options = {
        "tensor_parallel_size": args.ranks, "enable_expert_parallel": True, "enable_eplb": True,
        "num_redundant_experts": args.redundant, "eplb_window_size": args.steps // 8,
        "eplb_step_interval": args.steps // 4,
    }  # fmt: skip
    rng = random.Random(1)
    prompts = [random_prompt(rng, 24, args.shape) for _ in range(8)]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=16)
    with make_llm(args.shape, **{**options, **args.engine}) as llm:
        settle_heap()  # as a server does: else the longest stop is the garbage collector's
        before = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
        figures = measure(llm, args.shape, args.batch, args.steps)
        after = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
        figures["imbalance"] = llm._core.stats().figures["expert_imbalance"]
    figures["answers_that_differ"] = sum(list(a) != list(b) for a, b in zip(before, after, strict=True))
    print(figures, flush=True)
    write(args.out, {"shape": args.shape, "ranks": args.ranks, "batch": args.batch, **figures})


if __name__ == "__main__":
    main()
