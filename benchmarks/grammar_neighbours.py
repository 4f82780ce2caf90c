"""What the neighbours of heavy grammars feel: inter-token latency while they compile, against none compiling.

    python -m benchmarks.grammar_neighbours [--streams 8] [--seconds 2] [--rounds 6] [--out results/neighbours.json]

Greedy streams of the built-in model run without end in one engine of this process: the device's, without a server, so
that all host work of an engine's replica shares one interpreter, and nothing is hidden by a slow model. A client brings
one grammar after another, none of them in the cache: `large` ones, which the limits let in, and `hostile` ones, which
the sandbox process is killed for, both without a pause; and `small` ones, SMALL_PER_S. Phases without and with the
client take turns; the ratio of a round compares its phase under load with the mean of the two quiet ones around it, and
the table shows the median round. On fewer than 4 cores it says little: the sandbox process takes those of the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.errors import MantaError
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.structured.structured_outputs import StructuredOutputs

STREAM_TOKENS = 400  # a stream that ends is followed by a new one, so that contexts stay as long as they are
SMALL_PER_S = 20  # small grammars a second; each is also a request of its own, which is not what is measured
MIN_TOKENS = 200  # in a phase
PER_KIND = 12  # grammars that a client cycles through; the cache holds one

Figures = dict[str, float]


def large(i: int) -> list[StructuredOutputs]:
    """Grammars near the limits that are accepted."""
    many = {f"p{i}_{j}": {"type": "string"} for j in range(1200)}
    return [
        StructuredOutputs(json={"type": "object", "properties": many, "additionalProperties": False}),
        StructuredOutputs(json={"enum": [f"{i}-{j}" for j in range(8_000)]}),
        StructuredOutputs(regex="|".join(f"w{i}x{j}" for j in range(12_000))),
    ]


def hostile(i: int) -> list[StructuredOutputs]:
    """Small enough to be tried and too costly to be compiled; and one whose cost comes as text is matched."""
    many = {f"p{i}_{j}": {"type": "string"} for j in range(5000)}
    return [
        StructuredOutputs(json={"type": "object", "properties": many, "additionalProperties": False}),
        StructuredOutputs(json={"allOf": [{"type": "integer", "multipleOf": 9_000 + i + j} for j in (1, 4, 10)]}),
        StructuredOutputs(regex=f"(a|b|ab){{1,5000}}{{1,5000}}c{i}"),
    ]


def small(i: int) -> list[StructuredOutputs]:
    """Grammars such as applications send."""
    return [StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {"type": "integer"}}})]


KINDS: dict[str, Callable[[int], list[StructuredOutputs]]] = {"large": large, "hostile": hostile, "small": small}


class Neighbours:
    """Streams of tokens from one engine, and when each came."""

    def __init__(self, streams: int) -> None:
        info = ModelInfo.from_directory("tiny-chat")
        config = EngineConfig(
            model="tiny-chat", executor="in_process", num_threads=1, max_num_seqs=64, grammar_cache_size=1
        )
        self._arrivals: dict[str, list[float]] = {}
        self._ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ids = count()
        core = EngineCore(config, info, create_executor(config), secrets.token_bytes(32))
        self.engine = AsyncEngine(core, self._deliver, lambda error: None, warm_grammars=True)
        self.engine.start()
        for i in range(streams):  # ends spread over time
            self._add(STREAM_TOKENS * (i + 1) // streams)
        self._feeder = threading.Thread(target=self._feed)
        self._feeder.start()

    def _add(self, max_tokens: int) -> None:
        i = next(self._ids)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        self.engine.add_request(EngineRequest(f"stream-{i}", [5, 6, 7 + i % 200], params))

    def _feed(self) -> None:
        """New streams for those that have ended; the engine's own thread may not add them."""
        while self._ended.get() is not None:
            self._add(STREAM_TOKENS)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            if not output.request_id.startswith("stream-"):
                continue
            if output.new_token_ids:
                self._arrivals.setdefault(output.request_id, []).append(now)
            if output.finish_reason is not None:
                self._ended.put(1)

    def phase(self, seconds: float) -> Figures:
        """Inter-token latency of the streams in the next `seconds`, or as many more as MIN_TOKENS take."""
        self._arrivals = arrivals = {}
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds or sum(map(len, list(arrivals.values()))) < MIN_TOKENS:
            if passed > seconds + 60:
                raise RuntimeError(f"the streams gave fewer than {MIN_TOKENS} tokens in {passed:.0f} s")
            time.sleep(max(0.05, seconds - passed))
        self._arrivals = {}
        gaps = np.concatenate([np.diff(times) for times in list(arrivals.values())])
        p50, p99 = np.percentile(gaps, [50, 99])
        found = {"mean_ms": np.mean(gaps), "p50_ms": p50, "p99_ms": p99, "max_ms": np.max(gaps)}
        return {**{name: 1e3 * float(value) for name, value in found.items()}, "tokens": float(len(gaps))}

    def close(self) -> None:
        """End the streams and the engine."""
        self._ended.put(None)
        self._feeder.join()
        self.engine.shutdown()


class Client:
    """Brings one grammar after another, from a thread of its own; counts how they were answered."""

    def __init__(self, engine: AsyncEngine, kind: str) -> None:
        self._engine, self._kind = engine, kind
        self._specs = cycle([spec for i in range(PER_KIND) for spec in KINDS[kind](i)])
        self._ids = count()
        self.taken: list[float] = []
        self.refused: list[float] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Send for as long as the block runs."""
        done = threading.Event()
        thread = threading.Thread(target=self._run, args=(done,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _run(self, done: threading.Event) -> None:
        while not done.is_set():
            params = SamplingParams(max_tokens=2, seed=0, structured_outputs=next(self._specs))
            began = time.perf_counter()
            try:
                self._engine.add_request(EngineRequest(f"{self._kind}-{next(self._ids)}", [5], params))
            except MantaError:
                self.refused.append(time.perf_counter() - began)
            else:
                self.taken.append(time.perf_counter() - began)
            if self._kind == "small":
                done.wait(1 / SMALL_PER_S)

    def figures(self) -> Figures:
        """How many were taken and refused, and the longest that one took."""
        slowest = max([*self.taken, *self.refused], default=0.0)
        return {"taken": len(self.taken), "refused": len(self.refused), "answered_max_s": slowest}


def compare(running: Neighbours, kind: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Quiet phases and phases with a client in turns; ratios are of the median round."""
    client = Client(running.engine, kind)
    quiet, busy = [running.phase(seconds)], []
    for _ in range(rounds):
        with client.at_work():
            busy.append(running.phase(seconds))
        quiet.append(running.phase(seconds))
    ratios = {}
    for name in ("mean_ms", "p50_ms", "p99_ms"):
        pairs = zip(busy, quiet[:-1], quiet[1:], strict=True)
        ratios[name.removesuffix("_ms")] = [2 * b[name] / (before[name] + after[name]) for b, before, after in pairs]
    return {
        "quiet": _median(quiet),
        "busy": _median(busy),
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "worst_round_ratio": {name: max(values) for name, values in ratios.items()},
        "grammars": client.figures(),
    }


def _median(phases: list[Figures]) -> Figures:
    return {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}


def neighbours(streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Every kind of client against the same streams."""
    running = Neighbours(streams)
    try:
        running.phase(max(1.0, seconds))
        found = {kind: compare(running, kind, seconds, rounds) for kind in KINDS}
    finally:
        running.close()
    return {"cores": len(os.sched_getaffinity(0)), "streams": streams, "seconds": seconds, "rounds": rounds, **found}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        "| grammars | taken | refused | slowest answer, s | ITL quiet, ms: mean / p99 | under load | ratio of means | "
        "of p99 | of means, worst round |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        one = report[kind]
        quiet, busy, ratio, grammars = one["quiet"], one["busy"], one["ratio"], one["grammars"]
        lines.append(
            f"| {kind} | {grammars['taken']} | {grammars['refused']} | {grammars['answered_max_s']:.2f} "
            f"| {quiet['mean_ms']:.2f} / {quiet['p99_ms']:.2f} | {busy['mean_ms']:.2f} / {busy['p99_ms']:.2f} "
            f"| {ratio['mean']:.2f} | {ratio['p99']:.2f} | {one['worst_round_ratio']['mean']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one phase")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = neighbours(options.streams, options.seconds, options.rounds)
    print(table(report))
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
