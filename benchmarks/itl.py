"""Inter-token latency, time to first token and throughput of the engine under load, by how long a step may take.

    python -m benchmarks.itl --shape llama-8b [--step-s 0 0.025] [--open 22] [--closed 64 256] [--out results/itl.json]

Prompts of 1,024 random tokens, 128 output tokens, no prefix cache, no HTTP: what the scheduler alone brings. `--open`
requests arrive a second (Poisson) for `--seconds`; `--closed` are in flight at a time, four of each place. The same
engine serves all rows, its limit (`max_step_s`) changed in between; latencies are of tokens as the engine hands them
out. Its worker has a process of its own, as in a replica: launches in this one would hold up who takes the times.
"""

from __future__ import annotations

import queue
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from app.config.engine import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.engine.scheduler.prompt_time import PromptTime
from app.heap import settle_heap
from app.models.model_check import check_model
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from benchmarks.offline import BASELINE, arguments, random_prompt, write
from benchmarks.serve_process import ROOT
from benchmarks.shapes import write_shape

HEAD = "| step, s | load | req/s | TTFT ms median / p99 | ITL ms median / p99 / longest | TPOT ms median |"


class Load:
    """Requests of one row of the table, and when their tokens came."""

    def __init__(self, shape: str, lengths: tuple[int, int], seed: int) -> None:
        self._rng = random.Random(seed)
        self._shape, self._lengths = shape, lengths
        self.sent: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}

    def request(self) -> EngineRequest:
        """Make the next request and note that it is sent now."""
        name = f"r{len(self.sent)}-{self._rng.random()}"
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=self._lengths[1], seed=len(self.sent))
        self.sent[name], self.tokens[name] = time.perf_counter(), []
        return EngineRequest(name, random_prompt(self._rng, self._lengths[0], self._shape), params)

    def gap_s(self, rate: float) -> float:
        """Draw the time to the next arrival."""
        return self._rng.expovariate(rate)

    def take(self, outputs: list[EngineOutput]) -> int:
        """Note the tokens of a step; returns how many requests ended."""
        now = time.perf_counter()
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            self.tokens[output.request_id] += [now] * len(output.new_token_ids)
        return sum(output.finish_reason is not None for output in outputs)

    def figures(self) -> dict[str, float]:
        """Milliseconds, and requests a second."""
        first = [times[0] - self.sent[name] for name, times in self.tokens.items()]
        gaps = np.concatenate([np.diff(times) for times in self.tokens.values()])
        each = [(times[-1] - times[0]) / (len(times) - 1) for times in self.tokens.values()]
        ended = max(times[-1] for times in self.tokens.values())
        return {
            "req_s": len(first) / (ended - min(self.sent.values())),
            "ttft_median_ms": 1e3 * float(np.median(first)),
            "ttft_p99_ms": 1e3 * float(np.quantile(first, 0.99)),
            "itl_median_ms": 1e3 * float(np.median(gaps)),
            "itl_p99_ms": 1e3 * float(np.quantile(gaps, 0.99)),
            "itl_longest_ms": 1e3 * float(gaps.max()),
            "tpot_median_ms": 1e3 * float(np.median(each)),
        }


class Engine:
    """The engine on a thread of its own, as in a replica."""

    def __init__(self, shape: str, options: dict[str, Any]) -> None:
        self.arrived: queue.SimpleQueue[list[EngineOutput]] = queue.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            common = {"tokenizer": str(ROOT / "app/assets/tiny-chat"), "load_format": "dummy", "max_step_s": 1.0}
            model = {"model": str(write_shape(shape, Path(folder))), "executor": "local_processes"}
            config = EngineConfig(**{**BASELINE, **common, **model, **options})
            self._core = EngineCore(config, check_model(config), create_executor(config), b"k" * 32)
            self._engine = AsyncEngine(self._core, self.arrived.put, self._fail)
            self._engine.start()

    def add(self, request: EngineRequest) -> None:
        """Send a request."""
        self._engine.add_request(request)

    def limit(self, step_s: float) -> None:
        """Let steps with prompts take so long from now on."""
        scheduler = self._core._scheduler
        time_of = PromptTime(step_s, grows=scheduler._rules.prompt_time.grows)
        scheduler._rules = replace(scheduler._rules, prompt_time=time_of)

    def close(self) -> None:
        """Stop it."""
        self._engine.shutdown()

    def _fail(self, error: BaseException) -> None:
        raise error


def closed_loop(engine: Engine, load: Load, in_flight: int, total: int) -> None:
    """Keep `in_flight` requests running until `total` have ended."""
    for _ in range(in_flight):
        engine.add(load.request())
    ended = 0
    while ended < total:
        done = load.take(engine.arrived.get(timeout=60))
        ended += done
        for _ in range(min(done, total - len(load.sent))):
            engine.add(load.request())


def open_loop(engine: Engine, load: Load, rate: float, seconds: float) -> None:
    """Send requests as they arrive, whatever the engine does, then wait for the last."""
    begin = time.perf_counter()
    due, ended = begin, 0
    while due < begin + seconds or ended < len(load.sent):
        while due <= time.perf_counter() and due < begin + seconds:
            engine.add(load.request())
            due += load.gap_s(rate)
        wait_s = max(0.0, due - time.perf_counter()) if due < begin + seconds else 60.0
        try:
            ended += load.take(engine.arrived.get(timeout=wait_s or 1e-4))
        except queue.Empty:
            continue


def main() -> None:
    """Print a row for each load and length of a step."""
    parser = arguments(__doc__, "llama-8b")
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.0, 0.025])
    parser.add_argument("--open", type=float, nargs="*", default=[22.0])
    parser.add_argument("--closed", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    args = parser.parse_args()
    lengths = (args.input_len, args.output_len)
    engine = Engine(args.shape, args.engine)
    warm = Load(args.shape, lengths, 99)
    closed_loop(engine, warm, 16, 32)
    settle_heap()  # as a replica does: else a collection stops everything for 100 ms in the midst of a row
    loads: dict[str, Callable[[Load], None]] = {}
    for rate in args.open:
        loads[f"open, {rate:g}/s"] = partial(open_loop, engine, rate=rate, seconds=args.seconds)
    for count in args.closed:
        loads[f"{count} in flight"] = partial(closed_loop, engine, in_flight=count, total=max(12, 4 * count))
    rows = []
    print(HEAD, flush=True)
    for name, run in loads.items():
        for step_s in args.step_s:
            engine.limit(step_s)
            load = Load(args.shape, lengths, 0)
            run(load)
            row = load.figures()
            rows.append({"step_s": step_s, "load": name, **row})
            print(
                f"| {step_s:g} | {name} | {row['req_s']:.2f} | {row['ttft_median_ms']:.0f} / {row['ttft_p99_ms']:.0f} "
                f"| {row['itl_median_ms']:.1f} / {row['itl_p99_ms']:.1f} / {row['itl_longest_ms']:.0f} "
                f"| {row['tpot_median_ms']:.1f} |",
                flush=True,
            )
    engine.close()
    write(args.out, {"shape": args.shape, "rows": rows})


if __name__ == "__main__":
    main()
