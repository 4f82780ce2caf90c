"""The EngineReplica deployment: one engine in one placement group, reached by token channels and unary calls.

The event loop is shared with Serve's control plane, so nothing here blocks it: the engine steps on its own thread and
hands each step's outputs over with one wake-up. Any fatal error ends the process, once the requests have been told
(I7): Serve replaces a dead replica in seconds, an unhealthy one much later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from ray import serve

from app.api.engine_client import ReplicaAnswer
from app.api.work_pool import WorkPool
from app.backends import STAT_LOGGERS
from app.config import EngineConfig, IngressConfig, ModelConfig
from app.deployments.admin.fleet_state import FleetState, MemberReport
from app.deployments.admin.member import FleetMember
from app.deployments.admin.shared_state import SharedState
from app.deployments.autoscaling.figures import engine_figures
from app.deployments.canary import GENERATE_ONE, Canary
from app.deployments.channel.channel_hub import ChannelHub, TokenChannel
from app.deployments.channel.feed_hub import FeedHub
from app.deployments.channel.wire import LoadReport, decode_control
from app.deployments.cluster_secret import load_block_hash_key
from app.deployments.engine_factory import EngineFactory, ReplicaEngine, create_engine
from app.deployments.engine_metrics import EngineMetrics
from app.deployments.ray_metrics import RayMirror
from app.deployments.serve_logs import log_to_serve_files
from app.deployments.stall_watch import StallWatch
from app.deployments.start_errors import logs_start_error
from app.deployments.termination import Termination
from app.engine.kv_cache.kv_events import KVEventLog
from app.engine.kv_cache.kv_groups import KVGroups
from app.engine.kv_cache.model_revision import model_revision
from app.engine.model_info import ModelInfo
from app.engine.outputs import EngineOutput
from app.engine.pooling.info import pooling_info
from app.engine.pooling.params import PoolingParams
from app.engine.request import EngineRequest
from app.engine.sampling_params import SamplingParams
from app.engine.worker_info import WorkerInfo
from app.errors import EngineDeadError, MantaError
from app.heap import settle_heap
from app.router_config import RouterConfig
from app.telemetry.metrics import MetricsRecorder
from app.telemetry.stat_logger import StatLoggers

IDLE_HEARTBEAT_S = 1.0
ERROR_GRACE_S = 0.05  # an error output waits so long: the engine may be about to say that it died
MAX_WAITING_GRAMMARS = 256  # that are to be compiled, a quarter of them of one tenant
LONG_PROMPT_TOKENS = 8192  # to check and hash more prompt tokens takes milliseconds: not on the event loop
EXIT_GRACE_S = 1.0  # the last frames get so long to leave before the process exits

logger = logging.getLogger("manta.engine")


class EngineReplica:
    """Token ids in, token ids out; it never sees text (I4)."""

    @logs_start_error("an engine replica")
    async def __init__(  # type: ignore[misc]  # Serve awaits an asynchronous constructor
        self,
        model: ModelConfig,
        ingress: IngressConfig,
        router_config: RouterConfig,
        engine_factory: EngineFactory | None = None,
        has_admin: bool = False,
    ) -> None:
        log_to_serve_files()
        began = time.monotonic()
        context = serve.get_replica_context()
        self.replica_id: str = context.replica_id.unique_id
        self._model = model
        self._heartbeat_s = router_config.heartbeat_s
        self._incarnation = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"  # a later one is greater
        self._kv_events = KVEventLog(self.replica_id, self._incarnation)
        self._feeds = FeedHub(self._kv_events)
        self._index = context.rank.rank if context.rank is not None else 0
        self._fatal: str | None = None
        self._adding: set[asyncio.Future[Any]] = set()  # requests on their way into the engine
        self._stall_watch = StallWatch()
        self._metrics = EngineMetrics(
            MetricsRecorder(
                {"model_name": model.name, "engine": str(self._index)},
                max_tokens=model.engine.max_model_len or 1 << 20,
            ),
            model.slo,
        )
        # Grammars are compiled one at a time; those that wait must not hold up the rest.
        self._grammar_work = WorkPool(1, MAX_WAITING_GRAMMARS, MAX_WAITING_GRAMMARS // 4)
        self._loop = asyncio.get_running_loop()
        self._engine = await asyncio.to_thread(self._create_engine, engine_factory or create_engine)
        self._hub = ChannelHub(self._engine, ingress.credit_window_tokens, ingress.lease_s, self._metrics.ended)
        info = await asyncio.to_thread(self._start_engine)
        self._start_s = time.monotonic() - began
        self._revision = await asyncio.to_thread(_revision, model.engine)
        max_model_len = await asyncio.to_thread(_max_model_len, model.engine)
        groups = KVGroups(info.kv_windows, model.engine.block_size)
        self._kv_tokens = groups.num_context_tokens(info.num_blocks, max_model_len)
        self._metrics.kv_cache(groups.block_size, info.num_blocks, self._kv_tokens, max_model_len)
        work = await asyncio.to_thread(_canary_work, model.engine)
        self._canary = Canary(model.canary_interval_s, self._engine.add_request, work)
        self._member = FleetMember(self._control_engine, self._engine.stats().model_revision)
        self._has_admin = has_admin
        self._joining: asyncio.Task[None] | None = None
        if not has_admin:
            self._member.tell_alone()
        self._is_drained = False
        self._mirror = RayMirror(self._metrics.labels)
        self._stat_loggers = await asyncio.to_thread(_stat_loggers, model, self._metrics.labels)
        self._busy = asyncio.Event()  # a request came: the heartbeat wakes from its idle pace
        self._exit_task: asyncio.Task[None] | None = None
        self._heartbeat_task = asyncio.create_task(self._heartbeats())
        self._termination = Termination(self._on_sigterm)
        settle_heap()

    async def ping(self, asker_id: str) -> LoadReport:
        """Answer an ingress or a Router that looks for replicas. Serve hands it to running replicas only."""
        self._feeds.renew(asker_id)
        if self._joining is None and self._has_admin:  # in the running set, where the Admin finds it too
            self._joining = asyncio.create_task(self._member.join(SharedState(self._model.name).ask))
            self._joining.add_done_callback(self._on_joined)
        return self._report()

    async def open_channel(self, channel_id: str, ingress_id: str, target: str) -> AsyncIterator[bytes]:
        """The frames for one ingress, until it closes the channel or goes away; then its requests are aborted."""
        self._check_target(target)
        channel = self._hub.open(channel_id, ingress_id)
        channel.send([], load=self._report())
        try:
            async for frame in channel.frames():
                yield frame
        finally:
            self._hub.drop(channel)

    async def open_feed(self, router_id: str, target: str) -> AsyncIterator[bytes]:
        """Loads and KV events for one Router, until it goes away or this replica is being replaced."""
        self._check_target(target)
        feed = self._feeds.open(router_id, self._report())
        try:
            async for frame in feed.frames():
                yield frame
        finally:
            self._feeds.drop(feed)

    async def submit(
        self, channel_id: str, requests: list[tuple[str, EngineRequest]], target: str
    ) -> list[MantaError | None]:
        """Take requests of one prompt, by stream id, whose outputs shall go down a channel; returns why not, for each.

        Refusals are values. One argument holds all requests, so that one pickle does, with the prompt in it once.
        """
        taken = [self._take(channel_id, stream_id, request, target) for stream_id, request in requests]
        # Once they are in the hub they have to be seen through, also when the call that brought them is cancelled.
        adding = asyncio.ensure_future(self._add_all(taken))
        self._adding.add(adding)
        adding.add_done_callback(self._adding.discard)
        return await asyncio.shield(adding)

    async def seclude(self, channel_id: str, stream_id: str, target: str) -> bool:
        """Keep the replica for one stream; see ChannelHub. True once the engine computes nothing of any other one, so
        that what it dies of from then on is this one. EngineDeadError when it dies before."""
        self._check_target(target)
        if self._fatal is not None or not self._hub.seclude(channel_id, stream_id):
            return False
        if self._adding:
            await asyncio.wait(self._adding)
        await asyncio.wrap_future(self._engine.control("settle", {}))
        return self._fatal is None

    async def control(self, message: bytes, target: str) -> None:
        """Aborts, credits and the lease of one channel."""
        self._check_target(target)
        self._hub.control(decode_control(message))

    async def run_control(
        self, name: str, arguments: dict[str, Any], timeout_s: float, target: str = ""
    ) -> ReplicaAnswer:
        """A control call to the engine (app/engine/control), for whoever asks; one that waits is taken back in time."""
        return await self._answer(name, self._control_engine(name, arguments), timeout_s)

    async def bring_to(self, state: FleetState, timeout_s: float, target: str) -> ReplicaAnswer:
        """Become what the Admin says, whatever this replica is; see FleetMember."""
        self._check_target(target)
        return await self._answer("bring_to", self._member.bring_to(state), timeout_s)

    async def _control_engine(self, name: str, arguments: Mapping[str, Any]) -> Any:
        result = await asyncio.wrap_future(self._engine.control(name, arguments))
        self._canary.heard()  # after a sleep the next one is sent in its time
        self._hub.heartbeat(self._report())  # ahead of what the engine does next
        self._busy.set()
        return result

    async def _answer(self, name: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> ReplicaAnswer:
        """What the call brings; its error is a value."""
        try:
            return ReplicaAnswer(self.replica_id, await asyncio.wait_for(call, timeout_s))
        except MantaError as error:
            return ReplicaAnswer(self.replica_id, error=error)
        except TimeoutError:
            return ReplicaAnswer(self.replica_id, error=EngineDeadError(f"{name}: not done within {timeout_s:g} s"))
        except Exception as error:  # a bug of ours ends the call, not the replica
            logger.exception("control call %s failed", name)
            return ReplicaAnswer(self.replica_id, error=MantaError(f"{name}: {type(error).__name__}: {error}"))

    async def fleet_member(self) -> MemberReport:
        """The Admin looks who is there."""
        state, error = self._member.look(), self._member.error
        return MemberReport(self.replica_id, self._index, state, self._is_drained, error)

    async def fleet_state(self) -> FleetState | None:
        """Another replica asks, which starts while the Admin is not there."""
        return self._member.state

    async def tell_fleet_state(self, state: FleetState, target: str) -> bool:
        """The Admin says what the fleet is; False where this replica has not joined it yet."""
        self._check_target(target)
        return self._member.tell(state)

    async def drain(self, is_drained: bool, move: bool, target: str) -> bool:
        """Take this replica out of service, or back; `move`: what runs here goes on elsewhere at once."""
        self._check_target(target)
        self._is_drained = is_drained
        self._hub.heartbeat(self._report())
        self._busy.set()
        if is_drained and move:
            self._hub.give_up()
        return True

    async def leave(self, target: str) -> bool:
        """End this process: it does not follow the others. Its requests go on elsewhere, and Serve starts another."""
        self._check_target(target)
        self._go("does not follow the fleet")
        return True

    async def metrics_snapshot(self, target: str = "") -> bytes:
        """This replica's metrics, for any ingress to render."""
        return self._metrics.snapshot(self._engine.stats(), self._canary.age_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it where the number of replicas follows the load."""
        return engine_figures(self._engine.stats(), self._hub.num_streams, self._start_s)

    async def check_health(self) -> None:
        """Serve's health check: EngineDeadError when the engine cannot make progress."""
        if self._fatal is not None:
            raise EngineDeadError(self._fatal)
        self._engine.check_health()

    async def __del__(self) -> None:
        """Serve calls it once the replica is drained."""
        if hasattr(self, "_heartbeat_task"):
            self._heartbeat_task.cancel()
            self._stat_loggers.close()
            self._termination.close()
            await asyncio.to_thread(self._engine.shutdown)

    def _take(self, channel_id: str, stream_id: str, request: EngineRequest, target: str) -> EngineRequest | MantaError:
        """The request as the engine shall know it, its stream open; or why not."""
        request_id = f"{request.request_id}/{channel_id}/{stream_id}"  # clients may choose equal ids
        try:
            self._check_target(target)
            if not self._is_in_service:
                raise EngineDeadError(f"engine replica {self.replica_id} is out of service")
            self._hub.add(channel_id, stream_id, request_id)
        except MantaError as error:
            return error
        return dataclasses.replace(request, request_id=request_id)

    async def _add_all(self, taken: list[EngineRequest | MantaError]) -> list[MantaError | None]:
        num_tokens = sum(one.num_known_tokens for one in taken if isinstance(one, EngineRequest))
        is_long = num_tokens > LONG_PROMPT_TOKENS
        return [one if isinstance(one, MantaError) else await self._add(one, is_long) for one in taken]

    async def _add(self, request: EngineRequest, is_long: bool) -> MantaError | None:
        try:
            work = request.work
            grammar = work.structured_outputs if isinstance(work, SamplingParams) else None
            if grammar is not None and not self._engine.knows_grammar(grammar):
                tenant = request.placement.tenant
                waiting = self._grammar_work.submit(tenant, 0.0, lambda: self._compile_and_add(request))
                await asyncio.wrap_future(waiting)
            elif grammar is not None or is_long:
                await asyncio.to_thread(self._engine.add_request, request)
            else:
                self._engine.add_request(request)
        except MantaError as error:
            self._hub.remove(request.request_id)
            return error
        if not self._hub.has(request.request_id):  # aborted before the engine knew of it
            self._engine.abort([request.request_id])
        self._busy.set()
        return None

    def _compile_and_add(self, request: EngineRequest) -> None:
        """Runs in a thread, when it is the tenant's turn; its client may have left by then."""
        if self._hub.has(request.request_id):
            self._engine.add_request(request)

    def _create_engine(self, factory: EngineFactory) -> ReplicaEngine:
        """Runs in a thread: it reads files and the cluster's store."""
        return factory(
            self._model.engine,
            load_block_hash_key(),
            lambda outputs: self._post(self._on_outputs, outputs),
            lambda error: self._post(self._on_fatal, error),
            self._metrics,
            self._kv_events,
        )

    def _start_engine(self) -> WorkerInfo:
        """Runs in a thread: starting takes seconds to minutes."""
        started = time.monotonic()
        name = f"{self._model.name}[{self._index}]"
        logger.info("%s: starting workers and loading %s", name, self._model.engine.model)
        info = self._engine.start()
        for note in info.notes:
            logger.info("%s: %s", name, note)
        logger.info(
            "%s ready after %.1f s: %s, %s, %d KV blocks of %d tokens",
            *(name, time.monotonic() - started, info.device, info.dtype),
            *(info.num_blocks, self._model.engine.block_size),
        )
        return info

    def _post(self, callback: Callable[[Any], None], argument: Any) -> None:
        """From the engine's thread to the event loop; one wake-up a step."""
        self._loop.call_soon_threadsafe(callback, argument)

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        errors = [output for output in outputs if output.finish_reason == "error"]
        if errors:
            outputs = [output for output in outputs if output.finish_reason != "error"]
            self._loop.call_later(ERROR_GRACE_S, self._hub.dispatch, errors)
        if outputs:
            self._canary.heard()
        self._hub.dispatch(outputs)

    def _on_fatal(self, error: BaseException) -> None:
        """Tell every ingress, then end the process: Serve starts another one at once."""
        if self._fatal is not None:
            return
        self._fatal = f"the engine of model {self._model.name} died: {error}"
        logger.error("%s", self._fatal)
        channels = list(self._hub.channels)
        self._hub.fail(self._fatal)
        self._feeds.close()
        self._exit_task = asyncio.create_task(self._exit(channels))

    def _on_joined(self, joining: asyncio.Task[None]) -> None:
        """One that cannot join would take no requests for ever: it ends, and Serve starts another."""
        if not joining.cancelled() and (error := joining.exception()) is not None:
            self._go(f"could not join its fleet: {type(error).__name__}: {error}")

    def _on_sigterm(self) -> None:
        self._go("ends, as SIGTERM asks")

    def _go(self, why: str) -> None:
        """Let every request go on elsewhere, then end the process: Serve starts another one at once."""
        if self._fatal is not None:
            return
        self._fatal = f"engine replica {self.replica_id} {why}"
        logger.warning("%s; %d requests go on elsewhere", self._fatal, self._hub.num_streams)
        channels = list(self._hub.channels)
        self._hub.give_up()
        self._feeds.close()
        self._exit_task = asyncio.create_task(self._exit(channels))

    async def _exit(self, channels: list[TokenChannel]) -> None:
        for channel in channels:
            await channel.flushed(EXIT_GRACE_S)
        with contextlib.suppress(Exception):  # a worker that hangs must not outlive the replica
            await asyncio.wait_for(asyncio.to_thread(self._engine.shutdown), EXIT_GRACE_S)
        await asyncio.sleep(0.1)  # the transport's own buffers
        logging.shutdown()
        os._exit(1)

    async def _heartbeats(self) -> None:
        """Report the load, look after leases, and notice a dead engine within a second."""
        last: LoadReport | None = None
        sent_s = checked_s = 0.0
        while True:
            # Fast until idleness has been reported once, or the replica would look busy for another second.
            if self._hub.num_streams or (last is not None and last.outstanding_tokens):
                await asyncio.sleep(self._heartbeat_s)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._busy.wait(), IDLE_HEARTBEAT_S)
            self._busy.clear()
            self._engine.end_late()
            now = time.monotonic()
            report = self._report()
            if self._feeds.publish(report, force=report != last or now - sent_s >= IDLE_HEARTBEAT_S):
                last, sent_s = report, now
            if self._hub.retired:  # or Serve would wait for the Routers to let go
                self._feeds.close()
            if now - checked_s >= IDLE_HEARTBEAT_S:
                checked_s = now
                self._hub.heartbeat(report)
                self._look_after()

    def _look_after(self) -> None:
        self._feeds.expire()
        for ingress_id in self._hub.expire():
            logger.warning("ingress %s was silent for too long; its requests are aborted", ingress_id)
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            self._on_fatal(error)
            return
        self._canary.tick()
        snapshot = self._metrics.refresh(self._engine.stats(), self._canary.age_s)
        self._mirror.publish(snapshot)
        if self._stat_loggers.is_due(now := time.monotonic()):
            self._stat_loggers.publish(snapshot, now)

    def _report(self) -> LoadReport:
        stats = self._engine.stats()
        expecting = 0 if stats.is_paused else self._hub.num_unpaused
        progresses = self._stall_watch.progresses(stats.steps_total, expecting, self._engine.step_limit_s)
        return LoadReport(
            model=self._model.name,
            replica_id=self.replica_id,
            incarnation=self._incarnation,
            accepting=progresses and stats.refusal is None and self._is_in_service,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            outstanding_tokens=stats.outstanding_tokens,
            num_blocks=self._kv_tokens // self._model.engine.block_size,
            block_size=self._model.engine.block_size,
            index=self._index,
            queued_prefill_tokens=stats.outstanding_prefill_tokens,
            resident_tokens=(stats.num_blocks - stats.num_free_blocks) * self._kv_tokens // stats.num_blocks,
            max_num_seqs=self._model.engine.max_num_seqs,
            prefill_token_s=stats.prefill_token_s,
            decode_step_s=stats.decode_step_s,
            answers=self._canary.answers,
            model_revision=stats.model_revision if self._revision and stats.model_revision else self._revision,
            queued=stats.queued,
            begun_rate=stats.begun_rate,
            weights=stats.model_revision,
        )

    @property
    def _is_in_service(self) -> bool:
        has_joined = self._member.state is not None
        return has_joined and not self._is_drained and not self._hub.retired and self._fatal is None

    def _check_target(self, target: str) -> None:
        if target != self.replica_id:
            raise EngineDeadError(f"engine replica {target} is gone")


def _stat_loggers(model: ModelConfig, labels: dict[str, str]) -> StatLoggers:
    """Runs in a thread: it may import a plugin."""
    kinds = {name: STAT_LOGGERS.load(name) for name in model.stat_loggers}
    return StatLoggers(kinds, labels, model.stat_logger_interval_s)


def _revision(config: EngineConfig) -> str:
    """What this engine's block hashes begin with; empty when it caches nothing. Reads files."""
    return model_revision(ModelInfo.of(config), config) if config.enable_prefix_caching else ""


def _canary_work(config: EngineConfig) -> SamplingParams | PoolingParams:
    """Something that the engine's model does. Reads files."""
    pooling = pooling_info(config, ModelInfo.of(config))
    return GENERATE_ONE if pooling is None else PoolingParams(task=pooling.tasks[0])


def _max_model_len(config: EngineConfig) -> int:
    """Tokens of the longest request. Reads files."""
    return config.max_model_len or ModelInfo.of(config).max_position_embeddings
