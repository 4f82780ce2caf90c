"""Says what an engine replica needs of an engine, and makes the real one. Tests inject their own factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from app.config.engine import EngineConfig
from app.records.kv_events import KVEventSink
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.stats import EngineStats, StatsRecorder
from app.records.worker_info import WorkerInfo
from app.structured.structured_outputs import StructuredOutputs


class ReplicaEngine(Protocol):
    """AsyncEngine, as far as a replica uses it. `start` and `shutdown` block; the rest is quick and thread-safe."""

    def start(self) -> WorkerInfo:
        """Start the workers and the engine's thread."""

    def add_request(self, request: EngineRequest) -> None:
        """Take a request; raises InvalidRequestError and the like when it cannot be served."""

    def knows_grammar(self, spec: StructuredOutputs) -> bool:
        """True if a request with this grammar is taken, or refused, without compiling it."""

    def abort(self, request_ids: list[str]) -> None:
        """End these requests."""

    def end_late(self) -> None:
        """End requests whose deadline has passed."""

    def pause(self, request_id: str) -> None:
        """Schedule nothing for this request until it is resumed."""

    def resume(self, request_id: str) -> None:
        """Go on with a paused request."""

    def control(self, name: str, arguments: Mapping[str, Any]) -> Future[Any]:
        """A control call, run between steps; cancelling the future takes back one that waits."""

    def stats(self) -> EngineStats:
        """A snapshot of the load."""

    def step_limit_s(self) -> float:
        """Returns how long a step may take, in seconds, before it counts as hung."""

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine cannot make progress."""

    def shutdown(self) -> None:
        """Stop everything; idempotent."""


EngineFactory = Callable[
    [
        EngineConfig,
        bytes,
        Callable[[list[EngineOutput]], None],
        Callable[[BaseException], None],
        StatsRecorder,
        KVEventSink,
    ],
    ReplicaEngine,
]


def create_engine(
    config: EngineConfig,
    block_hash_key: bytes,
    on_outputs: Callable[[list[EngineOutput]], None],
    on_fatal: Callable[[BaseException], None],
    recorder: StatsRecorder,
    kv_event_sink: KVEventSink,
) -> ReplicaEngine:
    """The AsyncEngine over `config`'s executor, not started yet. CheckpointError names an unusable model directory."""
    from app.engine.async_engine import AsyncEngine
    from app.engine.core import EngineCore
    from app.engine.default_drafter import with_default_drafter
    from app.engine.executor import create_executor
    from app.models.model_check import check_model

    info = check_model(config)
    drafting = with_default_drafter(config, info)
    executor = create_executor(drafting)
    core = EngineCore(
        drafting, info, executor, block_hash_key, recorder=recorder, kv_event_sink=kv_event_sink, given=config
    )
    engine: ReplicaEngine = AsyncEngine(core, on_outputs, on_fatal, warm_grammars=True)
    return engine
