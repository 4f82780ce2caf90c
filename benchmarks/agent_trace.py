"""Cached share of the prompt tokens of coding agents: a model whose layers keep states beside a dense one.

    python -m benchmarks.agent_trace [--sessions 40] [--turns 20] [--replicas 1 4] [--gib 50] [--out results/trace.json]

Sessions of `--turns` turns: 2,000 tokens of system prompt and tools, which three of ten sessions share, a question,
then answers (40 to 400 tokens) and what tools say to them (200 to 4,000). Scheduler, KV-cache manager, block hashes, KV
events and Router are the real ones; nothing is computed, and a step takes what its tokens would. Both models have the
same memory for caches: 20 KiB a token and, where there are states, 61 MiB each, as Qwen3.6-35B-A3B.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import RouteQuery
from app.deployments.routing.prefix_index import PrefixIndex
from app.engine.core import EngineCore
from app.engine.executor.base import Executor
from app.records.block_hash import hash_blocks, root_hash
from app.records.kv_events import KVEventLog
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.state_pool import StatePool
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.records.worker_info import WorkerInfo
from app.text.message_marks import message_borders

KEY = b"a secret of this benchmark"
BLOCK, VOCAB, MARK = 16, 150_000, 1
BLOCK_BYTES, STATE_BYTES = 20 * 1024 * BLOCK, 61 << 20
STEP_S, TOKEN_S = 0.012, 40e-6  # of any step, of each token of prompts
HEAD_TOKENS, SHARED = 2000, 0.3
OPENING = [MARK, 2, 3]  # of a message
MODEL = "trace"


@dataclass
class Session:
    """One agent at work: its conversation so far, and what its tools will say."""

    tokens: list[int]
    tool_answers: list[list[int]]
    answer_lengths: list[int]
    ready_s: float
    turn: int = 0
    answer: list[int] = field(default_factory=list)


def sessions(count: int, turns: int, seed: int = 0) -> list[Session]:
    """The trace: the same for every model."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return rng.choices(range(10, VOCAB), k=length)

    shared, made = text(HEAD_TOKENS), []
    for _ in range(count):
        head = shared if rng.random() < SHARED else text(HEAD_TOKENS)
        answers = [text(rng.randint(200, 4000)) for _ in range(turns)]
        lengths = [rng.randint(40, 400) for _ in range(turns)]
        question = [*OPENING, *head, *OPENING, *text(rng.randint(20, 300))]
        made.append(Session(question, answers, lengths, rng.uniform(0.0, 60.0)))
    return made


class NothingComputed(Executor):
    """Workers that draw tokens at random, at once."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._outputs: list[ModelRunnerOutput] = []
        self._rng = np.random.default_rng(0)
        self.step_s = 0.0

    def start(self) -> WorkerInfo:
        """See Executor."""
        return self._info

    def submit(self, step_message: SchedulerOutput) -> None:
        """See Executor."""
        tokens = self._rng.integers(10, VOCAB, int(step_message.samples.sum()), dtype=np.int32)
        chunks = step_message.num_tokens - len(step_message.rows)
        self.step_s = STEP_S + TOKEN_S * chunks
        self._outputs.append(ModelRunnerOutput(step_message.step_id, tokens, step_time_s=self.step_s))

    def collect(self) -> list[ModelRunnerOutput]:
        """See Executor."""
        return [self._outputs.pop(0)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """See Executor."""
        raise AssertionError(method)

    def park(self) -> None:
        """See Executor."""

    def check_health(self) -> None:
        """See Executor."""

    def shutdown(self) -> None:
        """See Executor."""


class Replica:
    """An engine, and what the Router hears of it."""

    def __init__(self, number: int, num_bytes: int, with_states: bool) -> None:
        self.name = f"replica-{number}"
        self.events = KVEventLog(self.name, "1")
        states = StatePool(STATE_BYTES, None, -(-STATE_BYTES // BLOCK_BYTES)) if with_states else None
        self.executor = NothingComputed(WorkerInfo(num_bytes // BLOCK_BYTES, "cuda", "bfloat16", states=states))
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": 1 << 18, "num_hidden_layers": 40}
        config = EngineConfig(block_size=BLOCK, max_num_batched_tokens=8192, max_num_seqs=64, max_step_s=0)
        info = ModelInfo(Path(MODEL), {**sizes, "eos_token_id": None}, {})
        self.core = EngineCore(config, info, self.executor, KEY, kv_event_sink=self.events)
        self.core.start()

    def report(self) -> LoadReport:
        """Its heartbeat."""
        stats = self.core.stats()
        return LoadReport(
            MODEL, self.name, "1", True, stats.num_running, stats.num_waiting, stats.outstanding_tokens,
            stats.num_blocks, BLOCK, 0, stats.outstanding_prefill_tokens,
            (stats.num_blocks - stats.num_free_blocks) * BLOCK, self.core.config.max_num_seqs,
            TOKEN_S, STEP_S, model_revision=stats.model_revision,
        )  # fmt: skip


@dataclass
class Run:
    """All replicas behind one Router, and the sessions that use them; time is simulated."""

    replicas: dict[str, Replica]
    waiting: list[Session]
    now: float = 0.0
    num_prompt = num_cached = num_promised = num_broken = 0
    running: dict[str, tuple[Session, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = LoadBook(create_policy("prefix_aware"), lambda: self.now, PrefixIndex())

    def play(self) -> None:
        """Until every session has had its turns."""
        while self.waiting or self.running:
            self._tell_router()
            for session in [one for one in self.waiting if one.ready_s <= self.now]:
                self.waiting.remove(session)
                self._send(session)
            busy = [replica for replica in self.replicas.values() if replica.core.has_work()]
            for replica in busy:
                for output in replica.core.step():
                    self._take(output)
            slowest = max((replica.executor.step_s for replica in busy), default=0.0)
            soonest = min((one.ready_s for one in self.waiting), default=self.now)
            self.now = self.now + slowest if busy else max(self.now, soonest)

    def _tell_router(self) -> None:
        index = self.book.index
        assert index is not None
        for replica in self.replicas.values():
            if (batch := replica.events.flush()) is not None:
                index.apply(batch)
            self.book.report(replica.report())

    def _send(self, session: Session) -> None:
        prompt = list(session.tokens)
        revision = next(iter(self.replicas.values())).core.stats().model_revision
        root = root_hash(KEY, model=revision)
        hashes = tuple(hash_blocks(KEY, root, prompt[:-1], BLOCK))
        length = session.answer_lengths[session.turn]
        decision = self.book.route(RouteQuery(len(prompt), length, hashes))
        assert decision is not None
        request_id = f"{id(session)}-{session.turn}"
        borders = message_borders(prompt, frozenset([MARK]))
        self.running[request_id] = session, sum(decision.match) * BLOCK
        self.replicas[decision.replica_id].core.add_request(
            EngineRequest(
                request_id, prompt, SamplingParams(seed=0, max_tokens=length, ignore_eos=True),
                asks=() if borders is None else (borders,),
            )
        )  # fmt: skip

    def _take(self, output: EngineOutput) -> None:
        session, promised = self.running[output.request_id]
        session.answer += output.new_token_ids
        if output.finish_reason is None:
            return
        assert output.error is None, output.error
        del self.running[output.request_id]
        self.num_prompt += len(session.tokens)
        self.num_cached += output.num_cached_tokens
        self.num_promised += promised
        self.num_broken += max(0, promised - output.num_cached_tokens)
        session.tokens += [*session.answer, 4, *OPENING, *session.tool_answers[session.turn], 4, *OPENING]
        session.answer = []
        session.turn += 1
        session.ready_s = self.now + 2.0
        if session.turn < len(session.tool_answers):
            self.waiting.append(session)


def share(trace: list[Session], num_replicas: int, num_bytes: int, with_states: bool) -> dict[str, float]:
    """Plays a trace: the cached share of prompt tokens, and of the Router's promises those that were none."""
    replicas = [Replica(number, num_bytes, with_states) for number in range(num_replicas)]
    run = Run({replica.name: replica for replica in replicas}, trace)
    run.play()
    return {
        "prompt_tokens": run.num_prompt,
        "cached": run.num_cached / run.num_prompt,
        "promised": run.num_promised / run.num_prompt,
        "broken_promises": run.num_broken / run.num_prompt,
    }


def main() -> None:
    """Play, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=40, help="for each replica")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--gib", type=float, default=50.0, help="for caches of one replica")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for count in args.replicas:
        rows = {}
        for name, with_states in (("dense", False), ("states", True)):
            trace = sessions(args.sessions * count, args.turns)
            rows[name] = row = share(trace, count, int(args.gib * 2**30), with_states)
            print(f"{count} replicas, {name}: " + ", ".join(f"{k} {v:.6g}" for k, v in row.items()), flush=True)
        print(f"{count} replicas: {rows['states']['cached'] / rows['dense']['cached']:.4f} of a dense model's share")
        figures[str(count)] = rows
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
