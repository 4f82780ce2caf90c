"""Time to the first token of a conversation's second turn, beside that of the whole conversation computed anew.

    python -m benchmarks.second_turn --shape qwen3.5-4b [--cached 80000] [--new 500] [--out results/second_turn.json]

The first turn is `--cached` tokens and leaves them in the prefix cache; each second turn goes on behind it with other
tokens. Cold ones begin with a token of their own, so that nothing of them is found.
"""

from __future__ import annotations

import random
import time
from statistics import median

from app import LLM, SamplingParams
from benchmarks.offline import arguments, make_llm, random_prompt, write

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds until a prompt has its first token, and how many of its tokens were cached."""
    began = time.perf_counter()
    (answer,) = llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
    return time.perf_counter() - began, answer.num_cached_tokens or 0


def measure(llm: LLM, shape: str, num_cached: int, num_new: int, repeats: int) -> dict[str, float]:
    """The median of each kind of turn."""
    rng = random.Random(0)
    shared = random_prompt(rng, num_cached, shape)
    turns = [random_prompt(rng, num_new, shape) for _ in range(repeats + 1)]
    first_token_s(llm, random_prompt(rng, 2 * num_new, shape))
    cold = [first_token_s(llm, [number, *shared[1:], *turns[0]]) for number in (1, 2)]
    assert not sum(cached for _, cached in cold)
    first_token_s(llm, shared)
    warm = [first_token_s(llm, [*shared, *turn]) for turn in turns]
    cold_s, warm_s = min(seconds for seconds, _ in cold), median(seconds for seconds, _ in warm[1:])
    least = min(cached for _, cached in warm)
    return {"cold_ms": 1e3 * cold_s, "warm_ms": 1e3 * warm_s, "share": warm_s / cold_s, "cached": float(least)}


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, "qwen3.5-4b")
    parser.add_argument("--cached", type=int, default=80_000)
    parser.add_argument("--new", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    most = args.cached + args.new + 64
    engine = {"enable_prefix_caching": True, "max_model_len": most, "max_num_seqs": 16, **args.engine}
    with make_llm(args.shape, **engine) as llm:
        row = measure(llm, args.shape, args.cached, args.new, args.repeats)
    print(f"{args.shape} second turn: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    write(args.out, {"shape": args.shape, "new": args.new, **row})


if __name__ == "__main__":
    main()
