"""What structured outputs cost: compiling, masks, and the neighbours of whoever brings a hostile grammar.

    python -m benchmarks.structured [--vocabulary 128000] [--streams 8] [--seconds 6] [--out results/structured.json]

`compile` is from a StructuredOutputs to a matcher, in the trial's process and in the engine; `mask` and `accept` are of
one row, on a walk of random allowed tokens. Neighbours are greedy streams of the built-in model, whose inter-token
latency is taken in three phases of equal length: alone, while hostile grammars come one after another, and alone again.
`tools` is the share of held-out tool calls that the built-in model makes right at temperature 1, with and without a
grammar that enforces a call.
"""

from __future__ import annotations

import argparse
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from app import LLM, SamplingParams
from app.api.parsers.base import Schema
from app.api.parsers.grammar import Lark
from app.api.parsers.hermes import HermesParser
from app.config import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.engine.model_info import ModelInfo
from app.engine.outputs import EngineOutput
from app.engine.request import EngineRequest
from app.engine.structured.compiler import GrammarCompiler
from app.engine.structured.grammar import compile_grammar
from app.engine.structured.limits import GrammarLimits
from app.engine.structured.matcher import Matcher
from app.engine.structured.structured_outputs import StructuredOutputs
from app.engine.structured.vocabulary import VocabularySource
from app.errors import MantaError
from app.text.tokenizer import Tokenizer
from tests.engine.structured.grammars import all_grammars
from tools.tiny_chat.evaluate import parse_tool_calls, same_calls

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
    """A new grammar at the engine's door: tried in the other process, then compiled."""
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


class Neighbours:
    """Streams of tokens from one engine, and when each came."""

    def __init__(self, streams: int) -> None:
        config = EngineConfig(model="tiny-chat", executor="in_process", num_threads=1, max_num_seqs=64)
        self._arrivals: dict[str, list[float]] = {}
        core = EngineCore(config, MODEL, create_executor(config), secrets.token_bytes(32))
        self.engine = AsyncEngine(core, self._deliver, lambda error: None, warm_grammars=True)
        self.engine.start()
        for i in range(streams):
            params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, seed=0)
            self.engine.add_request(EngineRequest(f"stream-{i}", [5, 6, 7 + i], params))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            if output.new_token_ids:
                self._arrivals.setdefault(output.request_id, []).append(now)

    def phase(self, seconds: float) -> dict[str, float]:
        """Inter-token latency of the streams in the next `seconds`."""
        self._arrivals = {}
        time.sleep(seconds)
        arrivals = [times for name, times in list(self._arrivals.items()) if name.startswith("stream-")]
        gaps = [float(gap) for times in arrivals for gap in np.diff(times)]
        return {"mean_ms": 1e3 * float(np.mean(gaps)), **_spread("itl_ms", gaps, 1e3), "tokens": float(len(gaps))}


def hostile_grammars() -> Iterator[StructuredOutputs]:
    """Grammars that the limits let in, or stop only in the process that tries them; each is new."""
    i = 0
    while True:
        i += 1
        many = {f"p{i}_{j}": {"type": "string"} for j in range(6000)}
        yield StructuredOutputs(json={"type": "object", "properties": many, "additionalProperties": False})
        yield StructuredOutputs(json={"enum": [f"{i}-{j}" for j in range(10_000)]})
        yield StructuredOutputs(json={"type": "integer", "multipleOf": 40_000 + i})
        yield StructuredOutputs(regex="|".join(f"w{i}x{j}" for j in range(15_000)))


@contextmanager
def attack(engine: AsyncEngine) -> Iterator[list[float]]:
    """A client that sends one hostile grammar after another; seconds that each took to be answered."""
    done, took = threading.Event(), []
    specs = list(islice(hostile_grammars(), 200))  # made beforehand: that is the client's work

    def run() -> None:
        for i, spec in enumerate(specs):
            if done.is_set():
                return
            began = time.perf_counter()
            params = SamplingParams(max_tokens=2, seed=0, structured_outputs=spec)
            with suppress(MantaError):
                engine.add_request(EngineRequest(f"hostile-{i}", [5], params))
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        done.set()
        thread.join()


def neighbours(streams: int, seconds: float) -> dict[str, Any]:
    """Inter-token latency alone, under attack, and alone again."""
    running = Neighbours(streams)
    try:
        running.phase(1.0)
        before = running.phase(seconds)
        with attack(running.engine) as took:
            under = running.phase(seconds)
        after = running.phase(seconds)
    finally:
        running.engine.shutdown()
    alone = (before["mean_ms"] + after["mean_ms"]) / 2
    return {
        "before": before,
        "under": under,
        "after": after,
        "ratio": under["mean_ms"] / alone,
        "grammars": len(took),
        "answered_max_s": max(took),
    }


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
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = VocabularySource(MODEL.directory, MODEL.vocab_size, MODEL.eos_token_ids)
    report = {
        "grammars": [grammars(source.load()), grammars(big_vocabulary(options.vocabulary))],
        "trial": trial(),
        "neighbours": neighbours(options.streams, options.seconds),
        "tools": tool_calls(),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
