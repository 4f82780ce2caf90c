"""What structured outputs cost: compiling, masks, and the neighbours of whoever brings a hostile grammar.

    python -m benchmarks.structured [--vocabulary 128000] [--streams 8] [--seconds 2] [--rounds 6] [--out FILE]

`compile` is from a StructuredOutputs to a matcher, in the sandbox process and in the engine; `mask` and `accept` are of
one row, on a walk of random allowed tokens. `neighbours` is `benchmarks.grammar_neighbours`, which also runs alone.
`tools` is the share of held-out tool calls that the built-in model makes right at temperature 1, with and without a
grammar that enforces a call.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from app import LLM, SamplingParams
from app.checkpoints.model_info import ModelInfo
from app.parsers.base import Schema
from app.parsers.grammar import Lark
from app.parsers.hermes import HermesParser
from app.quantize.questions import parse_tool_calls, same_calls
from app.structured.compiler import GrammarCompiler
from app.structured.grammar import compile_grammar
from app.structured.limits import GrammarLimits
from app.structured.matcher import Matcher
from app.structured.structured_outputs import StructuredOutputs
from app.structured.vocabulary import VocabularySource
from app.text.tokenizer import Tokenizer
from benchmarks.grammar_neighbours import neighbours, table
from tests.structured.grammars import all_grammars

MODEL = ModelInfo.from_directory("tiny-chat")
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def big_vocabulary(size: int) -> LLTokenizer:
    """The built-in model's tokens and random words, some with JSON's signs at their end."""
    rng, table = Random(0), list(Tokenizer.from_directory(MODEL.directory).byte_table)
    known = set(table)
    while len(table) < size:
        word = rng.choice(["", " "]) + "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 9)))
        token = (word + rng.choice([""] * 9 + ['"', '",', ":", "}", "\n", "1"])).encode()
        if token not in known:
            known.add(token)
            table.append(token)

    of_byte = {token: i for i, token in enumerate(table) if len(token) == 1}

    class Words:
        eos_token_id, bos_token_id, is_tokenizer_wrapper = 2, None, True
        tokens, special_token_ids = table, (0, 1, 2)

        def __call__(self, text: str | bytes) -> list[int]:
            return [of_byte[bytes([byte])] for byte in (text.encode() if isinstance(text, str) else text)]

    return LLTokenizer(Words())  # type: ignore[arg-type]


def walk(matcher: Matcher, steps: int, rng: np.random.Generator) -> tuple[list[float], list[float]]:
    """Seconds of each mask and each accept, up to the end of the text."""
    masks, accepts = [], []
    words = np.zeros(matcher.num_words, np.int32)
    for _ in range(steps):
        began = time.perf_counter()
        matcher.fill_mask(words)
        masks.append(time.perf_counter() - began)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token in (0, 2):
            break
        began = time.perf_counter()
        matcher.accept(token)
        accepts.append(time.perf_counter() - began)
        if matcher.is_complete:
            break
    return masks, accepts


def grammars(vocabulary: LLTokenizer) -> dict[str, float]:
    """Compile and mask times over the test grammars."""
    compiles, masks, accepts = [], [], []
    rng = np.random.default_rng(0)
    for spec, _ in all_grammars().values():
        began = time.perf_counter()
        grammar = compile_grammar(spec, vocabulary)
        compiles.append(time.perf_counter() - began)
        for _ in range(5):
            found = walk(Matcher(grammar.deep_copy(), vocabulary), 300, rng)
            masks += found[0]
            accepts += found[1]
    return {
        "tokens": vocabulary.vocab_size,
        **_spread("compile_ms", compiles, 1e3),
        **_spread("mask_us", masks, 1e6),
        **_spread("accept_us", accepts, 1e6),
    }


def _spread(name: str, values: list[float], scale: float) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {f"{name}_p50": scale * p50, f"{name}_p99": scale * p99, f"{name}_max": scale * max(values)}


def trial() -> dict[str, float]:
    """A new grammar at the engine's entry: tried in the other process, then compiled."""
    source = VocabularySource(MODEL.directory, MODEL.vocab_size, MODEL.eos_token_ids)
    compiler = GrammarCompiler(source, GrammarLimits(), cache_size=1000)
    try:
        began = time.perf_counter()
        compiler.matcher(StructuredOutputs(regex="first"))
        cold = time.perf_counter() - began
        times = []
        for i in range(200):
            spec = StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {"type": "integer"}}})
            began = time.perf_counter()
            compiler.matcher(spec)
            times.append(time.perf_counter() - began)
        return {"cold_ms": 1e3 * cold, **_spread("new_ms", times, 1e3)}
    finally:
        compiler.close()


def tool_calls(seeds: int = 3) -> dict[str, float]:
    """Share of held-out calls made right at temperature 1: left alone, and under the grammar of a required call."""
    lines = (MODEL.directory / "heldout.jsonl").read_text().splitlines()
    examples = [e for e in map(json.loads, lines) if e["check"] == "tool_call" and e.get("tools")]
    right = {"free": 0, "enforced": 0}
    with LLM("tiny-chat", num_threads=1, max_num_seqs=64) as llm:
        prompts = [llm.render_chat(e["messages"], tools=e["tools"], add_generation_prompt=True)[1] for e in examples]
        for kind in right:
            for seed in range(seeds):
                specs = [_required(e["tools"]) if kind == "enforced" else None for e in examples]
                params = [SamplingParams(max_tokens=300, seed=seed, structured_outputs=spec) for spec in specs]
                answers = llm.generate(prompts, params, use_tqdm=False)
                for example, answer in zip(examples, answers, strict=True):
                    right[kind] += same_calls(example["expected"], parse_tool_calls(answer.outputs[0].text))
    return {"calls": float(len(examples) * seeds), **{k: v / len(examples) / seeds for k, v in right.items()}}


def _required(tools: list[dict[str, Any]]) -> StructuredOutputs:
    lark = Lark({})
    functions: dict[str, Schema] = {
        tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools
    }
    return StructuredOutputs(grammar=lark.finish(HermesParser.call_grammar({}).required(lark, functions, True)))


def main() -> None:
    """Everything, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one phase of `neighbours`")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = VocabularySource(MODEL.directory, MODEL.vocab_size, MODEL.eos_token_ids)
    report: dict[str, Any] = {
        "grammars": [grammars(source.load()), grammars(big_vocabulary(options.vocabulary))],
        "trial": trial(),
        "neighbours": neighbours(options.streams, options.seconds, options.rounds),
        "tools": tool_calls(),
    }
    text = json.dumps(report, indent=1)
    print(text)
    print(table(report["neighbours"]))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
