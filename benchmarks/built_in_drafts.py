"""What the drafters of the built-in model bring on a CPU: tokens/s with and without, and how often they are right.

    python -m benchmarks.built_in_drafts [--repeats 5] [--streams 1 16] [--out results/drafts.json]
    python -m benchmarks.built_in_drafts --families [--per-family 14]

Engines of one process with one thread each: the quickstart's without drafts, with `tiny-chat-draft` and with
`tiny-chat-eagle3`, both with drafts by their cost. They take turns, so that what else the machine does meets all of
them; a figure is the median over the turns of the ratio to the same turn without drafts, by wall clock and by CPU time.
`stories` are the prompts of benchmarks/http_vs_engine.py, 128 tokens each beyond the ends of answers; `chats` are
held-out questions of every family, one after the other, their prompts counted. `--families`: of seven drafts a step,
how many are right, by family of held-out questions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from app.offline.metrics import Counter
from app.quantize.questions import longest_answer, read_questions
from benchmarks.http_vs_engine import _prompts

DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "tiny-chat-draft": {"method": "draft_model", "model": "tiny-chat-draft"},
    "tiny-chat-eagle3": {"method": "eagle3", "model": "tiny-chat-eagle3"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
MOST_DRAFTS = 7
TOKENS = 128
COUNTED = ("drafts", "made", "right")


def engine(drafter: str, count: int | None = None) -> LLM:
    """The quickstart's, with `count` drafts a step, or as many as are worth their cost."""
    drafting = DRAFTERS[drafter]
    if drafting is not None and count is not None:
        drafting = {**drafting, "num_speculative_tokens": count}
    memory = 64 << 20
    return LLM(
        "tiny-chat",
        executor="in_process",
        num_threads=1,
        kv_cache_memory_bytes=memory,
        speculative_config=drafting,
        enable_prefix_caching=False,
    )


def questions(per_family: int) -> dict[str, list[dict[str, Any]]]:
    """The first held-out ones of each family."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in read_questions(ASSETS / "tiny-chat"):
        if len(found[one["family"]]) < per_family:
            found[one["family"]].append(one)
    return found


def ask(llm: LLM, question: dict[str, Any]) -> int:
    """Tokens of the greedy answer."""
    params = SamplingParams(temperature=0.0, max_tokens=longest_answer(question))
    options = {"tools": question.get("tools"), "chat_template_kwargs": question.get("chat_template_kwargs")}
    (answer,) = llm.chat(question["messages"], params, use_tqdm=False, **options)
    return len(answer.outputs[0].token_ids)


def stories(llm: LLM, streams: int) -> int:
    """Tokens of the prompts of `make bench`."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return sum(len(one.outputs[0].token_ids) for one in llm.generate(_prompts(streams), params, use_tqdm=False))


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """Tokens a second of the wall, and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """All engines in turn, over all kinds of work."""
    engines = {name: engine(name, args.drafts) for name in ("none", *args.drafters)}
    chats = [question for own in questions(args.chats).values() for question in own]
    kinds: dict[str, Callable[[LLM], int]] = {f"stories, {n}": lambda llm, n=n: stories(llm, n) for n in args.streams}
    if chats:
        kinds["chats, 1"] = lambda llm: sum(ask(llm, question) for question in chats)
    figures: dict[str, Any] = {}
    print("| work, streams | drafter | tok/s | tok/s of CPU time | over none, wall | over none, CPU |")
    print("|---|---|---|---|---|---|")
    for kind, work in kinds.items():
        for llm in engines.values():
            work(llm)
        turns = [{name: timed(partial(work, llm)) for name, llm in engines.items()} for _ in range(args.repeats)]
        for name in engines:
            wall, cpu = (median(turn[name][i] for turn in turns) for i in range(2))
            over = [median(turn[name][i] / turn["none"][i] for turn in turns) for i in range(2)]
            figures[f"{kind}, {name}"] = {"tokens_per_s": wall, "per_cpu_s": cpu, "over": over[0], "over_cpu": over[1]}
            print(f"| {kind} | {name} | {wall:,.0f} | {cpu:,.0f} | {over[0]:.2f} | {over[1]:.2f} |", flush=True)
    return figures


def counters(llm: LLM) -> dict[str, int]:
    """Drafts of steps, and how many of their tokens were right."""
    return {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    """Drafts that were right of those made, by family of questions."""
    figures: dict[str, Any] = {}
    for name in args.drafters:
        figures[name] = {}
        with engine(name, MOST_DRAFTS) as llm:
            for family, own in questions(args.per_family).items():
                before = counters(llm)
                for question in own:
                    ask(llm, question)
                found = {key: value - before[key] for key, value in counters(llm).items() if "spec_decode" in key}
                drafts, made, right = (
                    found[f"vllm:spec_decode_num_{key}"] for key in ("drafts", "draft_tokens", "accepted_tokens")
                )
                figures[name][family] = {"drafts": drafts, "made": made, "right": right}
    return figures


def show(figures: dict[str, Any]) -> None:
    """A table of families, and of all together."""
    names = list(figures)
    print("| family | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    families = list(figures[names[0]])
    for family in [*families, "all"]:
        cells = []
        for name in names:
            own = figures[name].values() if family == "all" else [figures[name][family]]
            drafts, made, right = (sum(one[key] for one in own) for key in COUNTED)
            cells.append(f"{right / max(1, made):.0%}, {1 + right / max(1, drafts):.2f}")
        print(f"| {family} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--chats", type=int, default=1, help="questions of each family")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS)[1:], choices=list(DRAFTERS)[1:])
    parser.add_argument("--drafts", type=int, help="of a step; left out, as many as are worth their cost")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--per-family", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.families:
        figures = acceptance(args)
        show(figures)
    else:
        figures = speeds(args)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
