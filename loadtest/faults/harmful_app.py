"""`import_path` of a deployment whose engines can be harmed from within: the real graph over the real engine, but

- a request with POISON_SEED ends the engine's process, as an input would that meets a fault in a kernel;
- what the engines tell the Routers of their caches is partly lost, doubled, late or made up.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

from ray import serve

from app.deployments.app import build_graph
from app.deployments.replica.engine_factory import ReplicaEngine, create_engine
from app.deployments.serve.serve_args import parse_args
from app.records.kv_events import KVEventSink, KVTier
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from loadtest.faults.mix import POISON_SEED


def build(args: dict[str, Any]) -> serve.Application:
    """See the head of this file."""
    return build_graph(parse_args(args), create_harmful_engine)


def create_harmful_engine(*parts: Any) -> ReplicaEngine:
    """An EngineFactory: create_engine's engine with both harms."""
    *others, sink = parts
    engine = create_engine(*others, Garbler(sink))
    add_request = engine.add_request

    def add(request: EngineRequest) -> None:
        if is_poisonous(request):
            os.kill(os.getpid(), signal.SIGKILL)
        add_request(request)

    engine.add_request = add  # type: ignore[method-assign]
    return engine


def is_poisonous(request: EngineRequest) -> bool:
    """Whether this request ends the engine that takes it."""
    return isinstance(request.work, SamplingParams) and request.work.seed == POISON_SEED


class Garbler:
    """A KVEventSink before another one: a quarter of what it hears is lost, a quarter said twice, a quarter late."""

    def __init__(self, sink: KVEventSink) -> None:
        self._sink = sink
        self._random = random.Random(0)
        self._late: list[Callable[[], None]] = []

    def report_stored(self, parent: bytes, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink; now and then blocks are stored that nobody has."""
        if self._random.random() < 0.1:
            self._sink.report_stored(parent, [self._random.randbytes(16) for _ in hashes], tier)
        self._tell(lambda: self._sink.report_stored(parent, list(hashes), tier))

    def report_removed(self, hashes: list[bytes], tier: KVTier = "device") -> None:
        """See KVEventSink."""
        self._tell(lambda: self._sink.report_removed(list(hashes), tier))

    def _tell(self, event: Callable[[], None]) -> None:
        fate = self._random.randrange(4)
        if fate == 0:
            return
        if fate == 1:
            self._late.append(event)
            return
        event()
        if fate == 2:
            event()
        while self._late:
            self._late.pop()()
