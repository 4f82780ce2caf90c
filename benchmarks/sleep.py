"""What sleeping gives back, and what waking costs, on one GPU (or CPU); the tokens must be the same afterwards.

    python -m benchmarks.sleep [--model DIRECTORY] [--level 1 2] [--rounds 3] [--out FILE.json] [--option k=v ...]

For each level and round: seconds and device memory of `sleep`, of `wake_up` (weights, KV cache, graphs) and, after
level 2, of `reload_weights`; seconds of the first answers after it. Exit 1 if a greedy answer differs from before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app import LLM, SamplingParams
from benchmarks.offline import write

GIB = 1 << 30
PROMPTS = [[7 + i, *range(20, 20 + 11 * i), 3] for i in range(1, 9)]


def used_bytes() -> int:
    """Memory of the device that is taken, by whomever; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def greedy(llm: LLM) -> list[list[int]]:
    """The answers to compare."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def one_round(llm: LLM, level: Any, expected: list[list[int]]) -> dict[str, Any]:
    """Sleep, wake, answer."""
    before = used_bytes()
    row: dict[str, Any] = {"level": level, "sleep_s": seconds(lambda: llm.sleep(level))}
    asleep = used_bytes()
    row |= {"freed_gib": (before - asleep) / GIB, "left_gib": asleep / GIB}
    row["wake_weights_s"] = seconds(lambda: llm.wake_up(["weights"]))
    row["reload_s"] = seconds(lambda: llm.collective_rpc("reload_weights")) if level == 2 else 0.0
    row["wake_kv_and_graphs_s"] = seconds(llm.wake_up)
    found: list[list[int]] = []
    row["first_answers_s"] = seconds(lambda: found.extend(greedy(llm)))
    row |= {"taken_again_gib": (used_bytes() - asleep) / GIB, "same_tokens": found == expected}
    return row


def main() -> int:
    """Print a line a round; exit 1 where tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--level", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--option", action="append", default=[], help="of EngineConfig, as name=value")
    arguments = parser.parse_args()
    options: dict[str, Any] = dict(option.split("=", 1) for option in arguments.option)
    with LLM(arguments.model, **options) as llm:
        expected = greedy(llm)
        assert greedy(llm) == expected, "greedy answers differ without any sleep"
        rows = [one_round(llm, level, expected) for level in arguments.level for _ in range(arguments.rounds)]
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.out is not None:
        write(arguments.out, {"model": arguments.model, "rows": rows})
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
