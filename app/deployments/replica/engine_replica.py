"""The EngineReplica deployment: one engine in one placement group, reached by token channels and unary calls.

The event loop is shared with Serve's control plane, so nothing here blocks it: the engine steps on its own thread and
hands each step's outputs over with one wake-up. Any fatal error ends the process, once the requests have been told
(I7): Serve replaces a dead replica in seconds, an unhealthy one much later.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ray import serve
from ray.util import get_node_ip_address

from app.api.engine_client import ReplicaAnswer
from app.backends import STAT_LOGGERS
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.model_revision import model_revision
from app.config.engine import EngineConfig
from app.config.ingress import IngressConfig
from app.config.model import ModelConfig
from app.config.router import RouterConfig
from app.deployments.admin.fleet_state import FleetState, MemberReport
from app.deployments.admin.member import FleetMember
from app.deployments.admin.shared_state import SharedState
from app.deployments.autoscaling.figures import engine_figures
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.channel_listener import ChannelListener
from app.deployments.channel.direct_messages import channel_secret
from app.deployments.channel.feed_hub import FeedHub
from app.deployments.channel.wire import decode_control
from app.deployments.process.cluster_secret import load_block_hash_key
from app.deployments.process.serve_logs import log_to_serve_files
from app.deployments.process.start_errors import logs_start_error
from app.deployments.process.termination import Termination
from app.deployments.replica.canary import GENERATE_ONE, Canary
from app.deployments.replica.control_answer import answer_of
from app.deployments.replica.ending import Ending
from app.deployments.replica.engine_factory import EngineFactory, ReplicaEngine, create_engine
from app.deployments.replica.engine_metrics import EngineMetrics
from app.deployments.replica.heartbeat import Heartbeat
from app.deployments.replica.intake import Intake
from app.deployments.replica.load_reporter import LoadReporter, new_incarnation
from app.deployments.replica.ray_metrics import RayMirror
from app.errors import EngineDeadError, MantaError
from app.heap import map_large_blocks, settle_heap
from app.records.encoder_info import EncoderInfo
from app.records.kv_events import KVEventLog
from app.records.kv_groups import KVGroups
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput
from app.records.pooling_info import pooling_info
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.worker_info import WorkerInfo
from app.telemetry.metrics_recorder import MetricsRecorder
from app.telemetry.stat_logger import StatLoggers
from app.telemetry.tenant_tokens import TenantLabels

ERROR_GRACE_S = 0.05  # an error output waits so long: the engine may be about to say that it died

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
        kv_events = KVEventLog(self.replica_id, new_incarnation())
        self._feeds = FeedHub(kv_events)
        self._index = context.rank.rank if context.rank is not None else 0
        self._metrics = _engine_metrics(model, self._index)
        self._ending: Ending
        post = _poster(asyncio.get_running_loop())
        key = await asyncio.to_thread(load_block_hash_key)
        self._metrics.label_tenants(TenantLabels(key))
        self._engine = await asyncio.to_thread(
            engine_factory or create_engine,
            model.run_engine,
            key,
            lambda outputs: post(self._on_outputs, outputs),
            lambda error: post(self._ending.fail, error),
            self._metrics,
            kv_events,
        )
        self._hub = ChannelHub(self._engine, ingress.credit_window_tokens, ingress.lease_s, self._metrics.note_end)
        self._ending = Ending(model.name, self.replica_id, self._hub, self._feeds, self._engine.shutdown)
        info = await asyncio.to_thread(_start_engine, self._engine, model, self._index)
        self._start_s = time.monotonic() - began
        revision = await asyncio.to_thread(_revision, model.engine) if info.finds_prefixes else ""
        max_model_len = await asyncio.to_thread(_max_model_len, model.engine)
        groups = KVGroups(info.kv_windows, model.engine.block_size)
        kv_tokens = groups.num_context_tokens(info.num_blocks, max_model_len)
        self._metrics.kv_cache(groups.block_size, info.num_blocks, kv_tokens, max_model_len)
        self._listener = ChannelListener(self, channel_secret(key), ingress)
        about = self.replica_id, kv_events.incarnation, self._index, kv_tokens, info.num_rows(model.engine.max_num_seqs)
        self._load = LoadReporter(model, *about, revision, await self._listener.start(get_node_ip_address()))
        work = await asyncio.to_thread(_canary_work, model.engine)
        self._canary = Canary(model.canary_interval_s, self._engine.add_request, *work)
        self._member = FleetMember.of(self._control_engine, self._engine.stats())
        self._has_admin = has_admin
        self._joining: asyncio.Task[None] | None = None
        if not has_admin:
            self._member.tell_alone()
        self._is_drained = False
        self._mirror = RayMirror(self._metrics.labels)
        self._stat_loggers = await asyncio.to_thread(_stat_loggers, model, self._metrics.labels)
        self._heartbeat = Heartbeat(
            router_config.heartbeat_s, self._hub, self._feeds, self._report, self._engine.end_late, self._look_after
        )
        self._intake = Intake(self._engine, self._hub, self._heartbeat.wake, ingress.media)
        self._termination = Termination(lambda: self._ending.go("ends, as SIGTERM asks"))
        settle_heap()
        if model.engine.executor != "in_process":  # the workers have processes of their own
            map_large_blocks()

    async def ping(self, asker_id: str) -> LoadReport:
        """Answer an ingress or a Router that looks for replicas. Serve hands it to running replicas only."""
        self._feeds.renew(asker_id)
        if self._joining is None and self._has_admin:  # in the running set, where the Admin finds it too
            self._joining = asyncio.create_task(self._member.join(SharedState(self._model.name).ask))
            self._joining.add_done_callback(self._ending.check_joined)
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
        """Take requests, by stream id, whose outputs shall go down a channel; returns why not, for each.

        Refusals are values. One argument holds all requests, so that one pickle does, with a prompt in it once.
        """
        return await self._intake.add([self._take(channel_id, *stream, target) for stream in requests])

    async def seclude(self, channel_id: str, stream_id: str, target: str) -> bool:
        """Keep the replica for one stream; see ChannelHub. True once the engine computes nothing of any other one, so
        that what it dies of from then on is this one. EngineDeadError when it dies before."""
        self._check_target(target)
        if self._ending.why is not None or not self._hub.seclude(channel_id, stream_id):
            return False
        await self._intake.wait_settled()
        await asyncio.wrap_future(self._engine.control("settle", {}))
        return self._ending.why is None

    async def control(self, message: bytes, target: str) -> None:
        """Aborts, credits and the lease of one channel."""
        self._check_target(target)
        self._hub.control(decode_control(message))

    async def run_control(
        self, name: str, arguments: dict[str, Any], timeout_s: float, target: str = ""
    ) -> ReplicaAnswer:
        """A control call to the engine (app/engine/control), for whoever asks; one that waits is taken back in time."""
        return await answer_of(self.replica_id, name, self._control_engine(name, arguments), timeout_s)

    async def bring_to(self, state: FleetState, timeout_s: float, target: str) -> ReplicaAnswer:
        """Become what the Admin says, whatever this replica is; see FleetMember."""
        self._check_target(target)
        return await answer_of(self.replica_id, "bring_to", self._member.bring_to(state), timeout_s)

    async def _control_engine(self, name: str, arguments: Mapping[str, Any]) -> Any:
        result = await asyncio.wrap_future(self._engine.control(name, arguments))
        self._canary.postpone()  # after a sleep the next one is sent in its time
        self._heartbeat.tell()
        return result

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
        self._heartbeat.tell()
        if is_drained and move:
            self._hub.give_up()
        return True

    async def leave(self, target: str) -> bool:
        """End this process: it does not follow the others. Its requests go on elsewhere, and Serve starts another."""
        self._check_target(target)
        self._ending.go("does not follow the fleet")
        return True

    async def metrics_snapshot(self, target: str = "") -> bytes:
        """This replica's metrics, for any ingress to render."""
        return self._metrics.snapshot(self._engine.stats(), self._canary.age_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it where the number of replicas follows the load."""
        return engine_figures(self._engine.stats(), self._hub.num_streams, self._start_s)

    async def check_health(self) -> None:
        """Serve's health check: EngineDeadError when the engine cannot make progress."""
        if self._ending.why is not None:
            raise EngineDeadError(self._ending.why)
        self._engine.check_health()

    async def __del__(self) -> None:
        """Serve calls it once the replica is drained."""
        if hasattr(self, "_termination"):
            await self._listener.drain()
            self._heartbeat.cancel()
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

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        errors = [output for output in outputs if output.finish_reason == "error"]
        if errors:
            outputs = [output for output in outputs if output.finish_reason != "error"]
            asyncio.get_running_loop().call_later(ERROR_GRACE_S, self._hub.dispatch, errors)
        if outputs:
            self._canary.postpone()
        self._hub.dispatch(outputs)

    def _look_after(self) -> None:
        self._feeds.expire()
        for ingress_id in self._hub.expire():
            logger.warning("ingress %s was silent for too long; its requests are aborted", ingress_id)
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            self._ending.fail(error)
            return
        self._canary.tick()
        snapshot = self._metrics.refresh(self._engine.stats(), self._canary.age_s)
        self._mirror.publish(snapshot)
        if self._stat_loggers.is_due(now := time.monotonic()):
            self._stat_loggers.publish(snapshot, now)

    def _report(self) -> LoadReport:
        stats = self._engine.stats()
        expecting = 0 if stats.held else self._hub.num_unpaused
        progresses = self._load.stall_watch.progresses(stats.steps_total, expecting, self._engine.step_limit_s)
        is_accepting = progresses and self._is_in_service
        return self._load.report(stats, is_accepting=is_accepting, answers=self._canary.answers)

    @property
    def _is_in_service(self) -> bool:
        has_joined = self._member.state is not None
        return has_joined and not self._is_drained and not self._hub.retired and self._ending.why is None

    def _check_target(self, target: str) -> None:
        if target != self.replica_id:
            raise EngineDeadError(f"engine replica {target} is gone")


def _engine_metrics(model: ModelConfig, index: int) -> EngineMetrics:
    labels = {"model_name": model.name, "engine": str(index)}
    return EngineMetrics(MetricsRecorder(labels, max_tokens=model.engine.max_model_len or 1 << 20), model.slo)


def _poster(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[Any], None], Any], None]:
    """From the engine's thread to the event loop; one wake-up a step."""

    def post(callback: Callable[[Any], None], argument: Any) -> None:
        loop.call_soon_threadsafe(callback, argument)

    return post


def _start_engine(engine: ReplicaEngine, model: ModelConfig, index: int) -> WorkerInfo:
    """Runs in a thread: starting takes seconds to minutes."""
    started = time.monotonic()
    name = f"{model.name}[{index}]"
    logger.info("%s: starting workers and loading %s", name, model.engine.model)
    info = engine.start()
    for adapter, path in model.served_adapters.items():
        engine.control("load_adapter", {"name": adapter, "path": path}).result()
    for note in info.notes:
        logger.info("%s: %s", name, note)
    logger.info(
        "%s ready after %.1f s: %s, %s, %d KV blocks of %d tokens",
        *(name, time.monotonic() - started, info.device, info.dtype),
        *(info.num_blocks, model.engine.block_size),
    )
    return info


def _stat_loggers(model: ModelConfig, labels: dict[str, str]) -> StatLoggers:
    """Runs in a thread: it may import a plugin."""
    kinds = {name: STAT_LOGGERS.load(name) for name in model.stat_loggers}
    return StatLoggers(kinds, labels, model.stat_logger_interval_s)


def _revision(config: EngineConfig) -> str:
    """Returns what this engine's block hashes begin with; empty when it caches nothing. Reads files."""
    return model_revision(ModelInfo.of(config), config) if config.enable_prefix_caching else ""


def _canary_work(config: EngineConfig) -> tuple[SamplingParams | PoolingParams, tuple[object, ...]]:
    """Something that the engine's model does, and what that takes besides a token. Reads files."""
    info = ModelInfo.of(config)
    pooling = pooling_info(config, info)
    if pooling is not None:
        return PoolingParams(task=pooling.tasks[0]), ()
    encoder = EncoderInfo.of(info)
    silence = None if encoder is None else encoder.silence()
    return GENERATE_ONE, () if silence is None else (silence,)


def _max_model_len(config: EngineConfig) -> int:
    """Tokens of the longest request. Reads files."""
    return config.max_model_len or ModelInfo.of(config).max_position_embeddings
