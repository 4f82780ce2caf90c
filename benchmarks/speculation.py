"""What verification and drafts cost a step, and what they bring at an imposed acceptance, on random weights.

    python -m benchmarks.speculation --shape llama-8b [--rows 1 8 32] [--out results/speculation.json]
    python -m benchmarks.speculation --shape llama-8b --rows 1 8 32 128 256 --automatic 0.05 0.75
    python -m benchmarks.speculation --shape qwen30a3b --even-routing --rows 1 32 --cases verify
    python -m benchmarks.speculation --shape glm-4.7-flash --even-routing --rows 1 32 --automatic 0.05 --beside mtp

Every engine says a text that is told in advance (benchmarks/replay.py), so acceptance is what is imposed: first plain
steps; then a drafter that is always right, so that a step with k drafts takes the time of its verification and brings
1 + k tokens; one that is right as often as makes `tau` tokens a step, with an EAGLE-3 drafter of random weights beside
it, of the shape's own width and 32,000 draft tokens; and n-grams of prompts and answers that go round in 64 tokens, as
edits say again what they were given. With `--automatic`, instead of these, engines with that drafter, or the shape's
own layer for multi-token prediction, whose number of drafts follows the cost, where so many of the drafts are right:
their first run, which is not counted, is the one in which they learn. All requests are right and wrong at the same
places, so that none ends before the others. `device` is the median time between the first and the last event of a step
on the GPU; tokens a second are of the wall, without the prompts. All engines of a run are on one device, one after
another.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app import LLM, SamplingParams
from app.config.speculative import MOST_AUTOMATIC
from app.records.outputs import RequestOutput
from benchmarks import replay
from benchmarks.offline import arguments, make_llm, random_prompt, watched_steps, write
from benchmarks.shapes import SHAPES

CONTEXT, TOKENS = 512, 160
DRAFT_VOCAB = 32_000
PERIOD = 64  # tokens of a text that repeats itself
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(slots=True, frozen=True)
class Case:
    """Drafts of a row, tokens a step at which they are right (None: always), and the drafter that runs."""

    drafts: int | None  # None: by their cost
    tau: float | None = None
    beside: str | None = None  # the replay, whose drafts count
    share: float | None = None  # of right drafts, where nothing says how many there are
    repeats: bool = False  # n-grams draft, of a text that does

    @property
    def name(self) -> str:
        """Name of its line in the table."""
        drafter = "ngram" if self.repeats else self.beside or "replay"
        if self.share is not None:
            return f"{drafter} {self.share} right"
        return f"{drafter} k={self.drafts}" + ("" if self.tau is None else f" tau={self.tau}")


VERIFY, VERIFY_MORE, EAGLE, EDITS = Case(3), Case(7), Case(3, 2.79, beside="eagle3"), Case(3, repeats=True)
CASES = {"verify": (VERIFY, VERIFY_MORE), "eagle": (EAGLE,), "ngram": (EDITS,)}


def prompts_of(shape: str, rows: int) -> list[list[int]]:
    """The same for all engines, but for a text that repeats itself: then its beginning."""
    if replay.IMPOSED.period < CONTEXT:
        return [replay.text_at(torch.arange(CONTEXT), SHAPES[shape]["vocab_size"]).tolist()] * rows
    rng = random.Random(rows)
    return [random_prompt(rng, CONTEXT, shape) for _ in range(rows)]


def measure(llm: LLM, shape: str, rows: int, tokens: int) -> dict[str, float]:
    """Times of decode steps, and what they bring."""
    prompts = prompts_of(shape, rows)
    ask = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=tokens, seed=i) for i in range(rows)]
    first = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=1, seed=i) for i in range(rows)]
    llm.generate(prompts, ask, use_tqdm=False)
    prefill, num_prefills, _ = counted(llm, prompts, first)
    with watched_steps() as watch:
        wall, steps, found = counted(llm, prompts, ask)
    wall, steps = wall - prefill, steps - num_prefills
    for one in found:
        wanted = replay.text_at(torch.arange(CONTEXT + 1, CONTEXT + tokens), SHAPES[shape]["vocab_size"])
        assert list(one.outputs[0].token_ids)[1:] == wanted.tolist(), "a request says something else"
    return {
        "device_ms": 1e3 * median(watch.device),
        "step_ms": 1e3 * wall / steps,
        "tokens_per_s": rows * (tokens - 1) / wall,
        "tokens_per_step": (tokens - 1) / steps,
        "schedule_us": watch.p50_us("schedule"),
        "update_us": watch.p50_us("update"),
    }


def counted(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, int, list[RequestOutput]]:
    """Seconds, steps and answers."""
    before, begin = llm._core.stats().steps_total, time.perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, llm._core.stats().steps_total - before, found


def eagle_folder(shape: str, folder: Path) -> str:
    """A drafter of the shape's width, without weights."""
    target, layers = SHAPES[shape], SHAPES[shape]["num_hidden_layers"]
    target = {"head_dim": 128, **target}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {name: target[name] for name in names} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": target["rope_theta"],
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": [min(2, layers), layers // 2, max(layers - 3, 0)],
        "draft_vocab_size": min(DRAFT_VOCAB, target["vocab_size"] // 2),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run_case(case: Case, rows: list[int], args: argparse.Namespace, folder: Path) -> dict[int, dict[str, float]]:
    """One engine, all numbers of rows."""
    wanted: dict[str, Any] = {"method": replay.NAME, "num_speculative_tokens": case.drafts}
    replay.IMPOSED.beside, replay.IMPOSED.period = case.beside, 1 << 30
    if case.beside == "eagle3":
        wanted["model"] = eagle_folder(args.shape, folder)
    if case.repeats:
        wanted, replay.IMPOSED.period = wanted | NGRAM, PERIOD
    most = case.drafts or MOST_AUTOMATIC
    width = CONTEXT + args.tokens + 2 * most + 2
    if case.share is not None:
        replay.IMPOSED.lies = replay.lies_at(case.share, width)
    else:
        replay.IMPOSED.lies = replay.lies_for(case.tau, most, CONTEXT, args.tokens - 1, width)
    with make_llm(args.shape, speculative_config=wanted, **options_of(args)) as llm:
        return {count: measure(llm, args.shape, count, args.tokens) for count in rows}


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Few graphs, as a run has few numbers of rows."""
    sizes = {"max_num_seqs": max(args.rows), "cuda_graph_sizes": tuple(args.rows), "max_model_len": 2048}
    return {**sizes, **args.engine}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All cases; each row is printed as it comes."""
    figures: dict[str, Any] = {"shape": args.shape, "plain": {}}
    began = time.monotonic()
    with make_llm(args.shape, **options_of(args)) as llm:
        print(f"{time.monotonic() - began:.0f} s to start", *llm.worker_info.notes, sep="\n", flush=True)
        for count in args.rows:
            row = measure(llm, args.shape, count, args.tokens)
            figures["plain"][count] = row
            show("plain", count, row, row)
    few = [count for count in args.rows if count <= 32]
    cases = [(case, few[:1] if case == VERIFY_MORE else few) for name in args.cases for case in CASES[name]]
    if args.automatic:
        cases = [(Case(None, beside=args.beside, share=share), args.rows) for share in args.automatic]
    for case, rows in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = run_case(case, rows, args, Path(folder))
        figures[case.name] = found
        for count, row in found.items():
            show(case.name, count, row, figures["plain"][count])
        write(args.out, figures)
    return figures


def show(name: str, rows: int, row: dict[str, float], plain: dict[str, float]) -> None:
    """A line of the table."""
    print(
        f"{name:>22} rows {rows:3d}: device {row['device_ms']:7.3f} ms ({row['device_ms'] / plain['device_ms']:.3f} x)"
        f", wall {row['step_ms']:7.3f} ms, {row['tokens_per_step']:.2f} tokens a step, "
        f"{row['tokens_per_s']:8.1f} tok/s ({row['tokens_per_s'] / plain['tokens_per_s']:.2f} x)",
        flush=True,
    )


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, "llama-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--automatic", type=float, nargs="+", default=[])
    parser.add_argument("--beside", choices=("eagle3", "mtp"), default="eagle3", help="the drafter of --automatic")
    args = parser.parse_args()
    with replay.told():
        figures = run(args)
    eagle, replayed = figures.get(EAGLE.name, {}), figures.get(VERIFY.name, {})
    for count in eagle.keys() & replayed.keys():
        print(f"EAGLE-3 draft, k=3, rows {count}: {eagle[count]['device_ms'] - replayed[count]['device_ms']:.3f} ms")


if __name__ == "__main__":
    main()
