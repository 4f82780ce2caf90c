"""How often a stream that goes on elsewhere takes another token than it would have, and how near the tie was.

    python -m benchmarks.continued [--model tiny-chat | --shape qwen3-0.6b] [--dtype bfloat16] [--out results/a.json]

Requests run to their end together; then each goes on behind a beginning of its output, cut at a random place, as it
does on another replica when its own dies: keys and values of what it had are computed in one go (no prefix cache),
where decoding had computed them token by token. In fp32 that may change nothing (exit 1); in bf16 rounding differs. Of
a stream that differs only the first token that does counts; `gap` is how much likelier (in logprob, by the undisturbed
run) the one token was than the other there. `again` is the undisturbed run once more; `regrouped` runs the requests in
four groups one after the other: what other neighbours in the batch change without any move.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import Any

from app import LLM, SamplingParams
from app.api.generation.request_builder import RequestBuilder
from app.offline.engine_loop import EngineLoop
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.step import TokenLogprobs
from benchmarks.offline import arguments, make_llm, random_prompt, write
from benchmarks.serve_process import ROOT

KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "top_p": 0.95}}
TOP = 20  # logprobs of each token: the other one is among them, or was no near tie
OPTIONS: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 256}


@dataclass(slots=True)
class Stream:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def run(llm: LLM, requests: Sequence[EngineRequest]) -> list[Stream]:
    """All of them together."""
    streams = {request.request_id: Stream() for request in requests}

    def take(output: EngineOutput) -> None:
        streams[output.request_id].token_ids += output.new_token_ids
        streams[output.request_id].logprobs += output.logprobs or []

    EngineLoop(llm._core).run([llm._core.prepare(request) for request in requests], take)
    return [streams[request.request_id] for request in requests]


def requests_of(llm: LLM, prompts: Sequence[list[int]], kind: str, num_tokens: int) -> list[EngineRequest]:
    """One for each prompt, each with a seed of its own."""
    made = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True, logprobs=TOP, **KINDS[kind])
        made += RequestBuilder(llm._model, params).choices(f"{kind}-{number}", prompt)
    return made


def compare(whole: Sequence[Stream], rest: Sequence[Stream], cuts: Sequence[int]) -> dict[str, Any]:
    """Streams that differ behind their cuts, and the gaps at the first token that does."""
    gaps: list[float] = []
    num_far = num_differ = 0
    for stream, other, cut in zip(whole, rest, cuts, strict=True):
        expected = stream.token_ids[cut:]
        place = next((i for i, (a, b) in enumerate(zip(expected, other.token_ids, strict=True)) if a != b), None)
        if place is None:
            continue
        num_differ += 1
        entry = stream.logprobs[cut + place]
        logprob = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        if (token := other.token_ids[place]) in logprob:
            gaps.append(abs(logprob[expected[place]] - logprob[token]))
        else:
            num_far += 1
    num_tokens = sum(len(stream.token_ids) for stream in rest)
    return {"streams": len(whole), "tokens": num_tokens, "differ": num_differ, **_spread(gaps), "beyond_top": num_far}


def _spread(gaps: list[float]) -> dict[str, float]:
    """Percentiles of the gaps; empty without any."""
    if len(gaps) < 2:
        return {"gap_p50": gaps[0], "gap_most": gaps[0]} if gaps else {}
    cuts = quantiles(gaps, n=100, method="inclusive")
    return {"gap_p50": round(cuts[49], 5), "gap_p90": round(cuts[89], 5), "gap_most": round(max(gaps), 5)}


def measure(llm: LLM, prompts: Sequence[list[int]], kind: str, num_tokens: int) -> dict[str, Any]:
    """Undisturbed, again, in groups, and continued at a random place."""
    rng = random.Random(1)
    requests = requests_of(llm, prompts, kind, num_tokens)
    whole, again = run(llm, requests), run(llm, requests)
    cuts = [rng.randint(1, num_tokens - 1) for _ in requests]
    moved = [
        replace(request, output_token_ids=stream.token_ids[:cut])
        for request, stream, cut in zip(requests, whole, cuts, strict=True)
    ]
    groups = [run(llm, requests[start::4]) for start in range(4)]
    regrouped = [groups[number % 4][number // 4] for number in range(len(requests))]
    return {
        "again": compare(whole, again, [0] * len(whole)),
        "regrouped": compare(whole, regrouped, [0] * len(whole)),
        "continued": compare(whole, run(llm, moved), cuts),
    }


def _built_in(model: str, rng: random.Random, args: argparse.Namespace) -> tuple[LLM, list[list[int]]]:
    llm = LLM(model, dtype=args.dtype, **OPTIONS, **args.engine)
    text = llm.tokenizer.encode((ROOT / "LICENSE").read_text())
    starts = [rng.randrange(len(text) - 200) for _ in range(args.requests)]
    return llm, [text[start : start + rng.randint(5, 150)] for start in starts]


def _random(rng: random.Random, args: argparse.Namespace) -> tuple[LLM, list[list[int]]]:
    llm = make_llm(args.shape, dtype=args.dtype, **{**OPTIONS, **args.engine})
    return llm, [random_prompt(rng, rng.randint(16, 512), args.shape) for _ in range(args.requests)]


def main() -> None:
    """Compare, print, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a checkpoint, or tiny-chat; without, random weights of --shape")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    rng, began = random.Random(0), time.monotonic()
    llm, prompts = _built_in(args.model, rng, args) if args.model else _random(rng, args)
    figures: dict[str, Any] = {"model": args.model or args.shape, "dtype": args.dtype}
    with llm:
        for kind in KINDS:
            figures[kind] = measure(llm, prompts, kind, args.tokens)
            print(figures["model"], args.dtype, kind, figures[kind], flush=True)
    figures["seconds"] = round(time.monotonic() - began, 1)
    write(args.out, figures)
    differ = sum(figures[kind]["continued"]["differ"] for kind in KINDS)
    raise SystemExit(int(args.dtype == "float32" and differ > 0))


if __name__ == "__main__":
    main()
