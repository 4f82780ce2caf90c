"""The Ingress deployment: the HTTP application over all models' engine replicas. It owns the requests.

A dispatcher for each model asks the Router which replica shall take a prompt, hands its requests over, and streams what
the replica's channel brings. A replica that dies costs the client nothing: the request goes on at another one. A dead
Router costs placement only. The event loop is shared with Serve's control plane and is never blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from app.api.admin.fleet import TIMEOUT_S
from app.api.engine_client import ReplicaAnswer, RouteInfo
from app.api.generation.served_models import load_served_model
from app.api.http.request_log import note_generation
from app.config.serve import ServeConfig
from app.deployments.autoscaling.figures import ingress_figures
from app.deployments.channel.direct_messages import channel_secret
from app.deployments.channel.direct_port import DirectPorts
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.channel.serve_port import LOST, EngineHandles, call
from app.deployments.ingress.adapter_finder import AdapterFinder, create_resolvers
from app.deployments.ingress.announcement import announce
from app.deployments.ingress.dispatcher import Dispatcher
from app.deployments.ingress.load_figures import load_figures
from app.deployments.ingress.metrics_collector import MetricsCollector
from app.deployments.ingress.peers import Peers, Refused, SharedQuarantines
from app.deployments.ingress.readiness import why_not_ready
from app.deployments.ingress.router_client import RouterClient
from app.deployments.ingress.served_names import ServedNames
from app.deployments.ingress.waiting_room import WaitingRoom
from app.deployments.process.cluster_secret import load_block_hash_key
from app.deployments.process.serve_logs import log_to_serve_files
from app.deployments.process.start_errors import logs_start_error
from app.deployments.process.termination import Termination
from app.deployments.router.admission import Admission
from app.deployments.router.prompt_hasher import PromptHasher
from app.deployments.router.question import Question
from app.deployments.router.retry_budget import RetryBudget
from app.deployments.router.route_explanation import RouteExplanation
from app.deployments.routing.policies.base import EXPECTED_TOKENS, RouteQuery
from app.deployments.serve.haproxy import warn_of_lost_settings
from app.deployments.serve.tenant_store import SharedStores
from app.errors import EngineDeadError, MantaError, ModelNotFoundError, OverloadedError
from app.heap import map_large_blocks, settle_heap
from app.media.reader import MediaReader
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest, Placement
from app.telemetry.metrics_recorder import MetricsRecorder
from app.telemetry.tenant_tokens import TenantLabels
from app.telemetry.tracing import Tracing
from app.text.served_model import ServedModel

PING_TIMEOUT_S = 2.0
EXPLAIN_TIMEOUT_S = 2.0
SIGTERM_GRACE_S = 25.0  # streams get so long to end; Kubernetes sends SIGKILL after 30
LAST_BYTES_S = 0.5  # an answer that has ended is on its way for so long
READY_WAIT_S = 60.0  # once one model can answer, the others get so long before the ingress opens without them

logger = logging.getLogger("manta.ingress")


class Ingress:
    """Implements EngineClient. `engines` and `router` are Serve handles."""

    _tracing: Tracing | None = None

    @logs_start_error("the ingress")
    async def __init__(  # type: ignore[misc]  # Serve awaits an asynchronous constructor
        self,
        config: ServeConfig,
        router: Any,
        engines: Mapping[str, Any],
        admin: Any = None,
    ) -> None:
        """`admin` is asked for adapters that are found; who is bound to a deployment has Serve start it."""
        log_to_serve_files()
        map_large_blocks()
        self._config = config
        self._explain = router.options(method_name="explain")
        self._ingress_id = uuid.uuid4().hex[:12]
        self._num_requests = 0
        self._idle = asyncio.Event()  # while there is none
        self._idle.set()
        self._num_of_tenant: Counter[str] = Counter()
        self._recorder = MetricsRecorder({"ingress": self._ingress_id}, scope="ingress")
        self._handles = {name: EngineHandles(handle) for name, handle in engines.items()}
        peers = Peers()
        self._quarantines = SharedQuarantines(peers, self._handles)
        self._metrics = MetricsCollector(self._recorder.labels, self._snapshot, self._handles, router, peers)
        key = await asyncio.to_thread(load_block_hash_key)
        secret = channel_secret(key) if config.ingress.channel == "direct" else None
        self._ports = {name: DirectPorts(handles, secret) for name, handles in self._handles.items()}
        self._pools = {name: self._create_pool(name) for name in self._handles}
        self._may_sleep = {model.name: model.may_sleep for model in config.models}
        self._names = ServedNames()
        self.models: dict[str, ServedModel] = self._names
        media = MediaReader(config.ingress.media, key)
        for model in config.models:
            self._names.serve(await asyncio.to_thread(load_served_model, model, media))
        self._waiting_rooms = {
            model.name: WaitingRoom(model.name, model.autoscaling, config.admin.held_wait_s) for model in config.models
        }
        self._hasher, self._tenant_labels = PromptHasher(key), TenantLabels(key)
        routes = RouterClient(router.options(method_name="route"), self._hasher, config.ingress.route_timeout_s)
        self._dispatchers = {
            model.name: Dispatcher(
                self._pools[model.name],
                routes,
                self._recorder,
                num_replicas=model.max_replicas,
                waiting_room=self._waiting_rooms[model.name],
                quarantine=self._quarantines.of[model.name],
                breaker_faults=config.admission.breaker_faults,
                admission=self._admission(model.name),
            )
            for model in config.models
        }
        self._needs_key = False
        self._stores = SharedStores(serve.get_replica_context().app_name, config.ingress)
        self._app = await asyncio.to_thread(self._create_app, admin)  # while the engines start
        await self._wait_ready()
        self._app.state.batch_runner.start(self._stores.exists)
        self._quarantines.learn()
        self._announcement = self._announce()
        self._leaving: asyncio.Task[None] | None = None
        self._termination = Termination(self._on_sigterm)
        settle_heap()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls it after the constructor."""
        return self._app

    def _create_app(self, admin: Any) -> FastAPI:
        """Runs in a thread: it imports much. ConfigError when the keys cannot be read."""
        from app.api.http.auth import ApiKeys
        from app.api.http.http_metrics import HttpMetrics
        from app.api.http.joined_routes import join_routes
        from app.api.server.app import create_app
        from app.api.server.debug import debug_routes
        from app.api.server.fleet import fleet_routes
        from app.api.server.profile import profile_routes
        from app.api.server.server_info import server_info_routes

        ingress = self._config.ingress
        keys = ApiKeys.load(ingress)
        logger.info("API keys: %s", keys.num_keys or "none, the server is open to everybody who can reach it")
        self._needs_key = keys.required
        app: FastAPI = create_app(self, ingress.limits, ingress, keys, self._stores.stores(), self._config.admission)
        if resolvers := create_resolvers(self._config.models):
            load = partial(_load_adapter, admin)
            app.state.learn_name = AdapterFinder(resolvers, self._names, load, self._recorder).learn
        app.state.server_adds_request_id = True  # Serve's own middleware, to what it is sent
        if ingress.admin:
            operators = debug_routes(self, ingress.limits), server_info_routes(self._config)
            join_routes(app, *operators, profile_routes(self, ingress))
        join_routes(app, fleet_routes(self))
        app.state.tenant_labels = self._tenant_labels
        app.state.tracing = self._tracing = Tracing.from_environment()
        app.state.http_metrics = HttpMetrics(self._recorder)
        app.state.engine_load = lambda: load_figures(self._pools.values())
        return app

    def _announce(self) -> asyncio.Task[None] | None:
        """One replica speaks for all."""
        context = serve.get_replica_context()
        if context.rank is not None and context.rank.rank != 0:
            return None
        warn_of_lost_settings(ray.get_runtime_context().get_node_id())
        first = self.models[self._config.models[0].name]
        return asyncio.create_task(announce(context.app_name, first.name, first.pooling is not None, self._needs_key))

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncIterator[EngineOutput]:
        """See EngineClient.generate."""
        served = self._names.of_request(model)
        if served is None:
            raise ModelNotFoundError(f"no model is served under the name {model!r}", param="model")
        tenant, count = request.placement.tenant, request.num_prompts
        self._check_room(request.placement, count)
        if served.max_kv_tokens is None:  # the ingress opened without a replica of this model
            served.max_kv_tokens = self._pools[served.engine_name].kv_tokens
        route = route or RouteInfo()
        route.record = note_generation(served.name, request)
        self._num_requests += count
        self._idle.clear()
        self._num_of_tenant[tenant] += count
        try:
            async with aclosing(self._dispatchers[served.engine_name].outputs(request, route)) as outputs:
                async for output in outputs:
                    yield output
        except MantaError as error:
            if route.record is not None:
                route.record.error = type(error).__name__
            raise
        finally:
            self._num_requests -= count
            if not self._num_requests:
                self._idle.set()
            self._num_of_tenant[tenant] -= count
            if not self._num_of_tenant[tenant]:
                del self._num_of_tenant[tenant]

    def _check_room(self, placement: Placement, count: int) -> None:
        """Checks what this ingress replica can tell by itself of `count` more requests; OverloadedError."""
        most = self._config.admission.of_tenant(placement.tenant).max_requests
        if most is not None and self._num_of_tenant[placement.tenant] + count > most:
            self._recorder.increment("manta:admission_total", 1.0, placement.service_class.name, "rejected_tenant")
            raise OverloadedError(f"at most {most} requests of yours may be in flight, and more would be; try later")
        if self._num_requests + count > self._config.ingress.limits.max_waiting_requests:
            self._recorder.increment("manta:ingress_rejections_total")
            self._recorder.increment("manta:admission_total", 1.0, placement.service_class.name, "rejected_ingress")
            raise OverloadedError(f"{self._num_requests} requests are in flight in this ingress replica; try later")

    async def control(self, model: str, name: str, arguments: dict[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """A control call (app/engine/control) to every running replica of a model; their answers, errors as values.

        ModelNotFoundError, EngineDeadError where there is no replica.
        """
        served = self.models.get(model)
        if served is None:
            raise ModelNotFoundError(f"no model is served under the name {model!r}", param="model")
        return await self._handles[served.engine_name].control_all(name, arguments, timeout_s)

    async def is_healthy(self) -> bool:
        """True only if every served model has a replica that can make progress, or may sleep."""
        return all(pool.live() or self._may_sleep[name] for name, pool in self._pools.items())

    def why_not_ready(self) -> str | None:
        """See Fleet.why_not_ready."""
        required = {name: pool for name, pool in self._pools.items() if not self._may_sleep[name]}
        return why_not_ready(required, is_full=self._is_full, is_leaving=self._leaving is not None)

    @property
    def _is_full(self) -> bool:
        return self._num_requests >= self._config.ingress.limits.max_waiting_requests

    async def replica_names(self) -> list[str]:
        """See Fleet.replica_names."""
        return await self._metrics.names(self._pools)

    async def replica_metrics(self, name: str) -> str | None:
        """See Fleet.replica_metrics."""
        return await self._metrics.one(name, self._pools)

    async def metrics_text(self) -> str:
        """The metrics of all engine, Router and ingress replicas."""
        await self._measure_stores()
        return await self._metrics.text()

    async def metrics_snapshot(self) -> bytes:
        """The metrics of this ingress replica, for another one's page."""
        await self._measure_stores()
        return self._snapshot()

    async def refuse(self, refused: Refused) -> None:
        """Another ingress replica has found requests that engines die of."""
        self._quarantines.refuse(refused)

    async def refused(self) -> Refused:
        """Those that are known here, for a new ingress replica."""
        return self._quarantines.refused()

    async def _measure_stores(self) -> None:
        for kind, (num_entries, num_bytes) in (await self._stores.sizes()).items():
            self._recorder.set("manta:ingress_stored_entries", num_entries, kind)
            self._recorder.set("manta:ingress_stored_bytes", num_bytes, kind)

    def _snapshot(self) -> bytes:
        state = self._app.state
        self._recorder.set("manta:ingress_requests", self._num_requests)
        self._recorder.set("manta:ingress_sockets", len(state.sockets))
        self._recorder.set("manta:ingress_held_bytes", state.held.total, "bodies")
        self._recorder.set("manta:ingress_held_bytes", state.batch_runner.held_bytes, "lines of batches")
        self._recorder.set("manta:ingress_channels", sum(len(pool.live()) for pool in self._pools.values()))
        connected = sum(ports.num_connected for ports in self._ports.values())
        self._recorder.set("manta:ingress_direct_channels", connected)
        self._recorder.set("manta:ingress_channels_lost_total", sum(pool.num_lost for pool in self._pools.values()))
        self._recorder.set("manta:ingress_store_down", float(self._stores.is_out))
        for name, room in self._waiting_rooms.items():
            self._recorder.set("manta:ingress_waiting_requests", room.num_requests, name)
        for name, pool in self._pools.items():
            is_down = not (pool.live() or self._may_sleep[name])
            self._recorder.set("manta:ingress_model_down", float(is_down), name)
        return self._recorder.snapshot()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it where the number of replicas follows the load."""
        rooms = self._waiting_rooms.items()
        return ingress_figures({name: (room.num_requests, room.num_tokens) for name, room in rooms})

    async def explain_route(
        self, model: str, prompt_token_ids: list[int], root: bytes, max_tokens: int, session: str
    ) -> dict[str, Any]:
        """See RouteExplainer.explain_route."""
        hashes = await self._hasher.hash_prompt(prompt_token_ids, root, self._pools[model].load)
        query = RouteQuery(len(prompt_token_ids), min(max_tokens, EXPECTED_TOKENS), hashes, session)
        try:
            question = Question.of(model, query)
            answer: RouteExplanation = await call(self._explain, question, timeout_s=EXPLAIN_TIMEOUT_S)
        except Exception as error:
            raise EngineDeadError(f"the Router does not answer: {error}") from error
        return answer.as_json()

    async def check_health(self) -> None:
        """Serve's health check of this replica: not of the engines, which have their own."""
        for pool in self._pools.values():
            if not pool.finder.is_searching:
                raise EngineDeadError(f"the search for replicas of {pool.model} has ended")

    async def __del__(self) -> None:
        """Serve calls it once the replica is drained."""
        for pool in getattr(self, "_pools", {}).values():
            await pool.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _on_sigterm(self) -> None:
        if self._leaving is None:
            logger.warning("SIGTERM: %d requests get %g s to end", self._num_requests, SIGTERM_GRACE_S)
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """End the process once its streams have ended: their connections cannot move. Serve starts another one."""
        self._app.state.sockets.leave()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SIGTERM_GRACE_S):
                if self._config.ingress.num_replicas != 1:  # others take what is new: HAProxy is told to send no more
                    await ray.get_runtime_context().current_actor.perform_graceful_shutdown.remote()
                await self._idle.wait()
                await asyncio.sleep(LAST_BYTES_S)
        logging.shutdown()
        os._exit(1)

    def _admission(self, model: str) -> Admission:
        """An admission over what this ingress itself knows, for when the Router is silent."""
        options = self._config.admission
        budget = RetryBudget(options.retry_share, options.min_retries_per_s)
        return Admission(options, self._pools[model].book, budget)

    def _create_pool(self, model: str) -> ReplicaPool:
        handles, ports = self._handles[model], self._ports[model]

        async def discover() -> Discovery:
            return ports.learn(await handles.ping(self._ingress_id, PING_TIMEOUT_S))

        shutdown_s = next(one.graceful_shutdown_timeout_s for one in self._config.models if one.name == model)
        pool = ReplicaPool(
            model, self._ingress_id, self._config.ingress, discover, ports.port, shutdown_s, self._update_names
        )
        pool.finder.start()
        return pool

    def _update_names(self, pool: ReplicaPool) -> None:
        """Serve the adapters that the replicas of a model tell of."""
        if hasattr(self, "_names"):
            self._names.set_adapters(pool.model, pool.adapters)

    async def _wait_ready(self) -> None:
        """Begin to accept only when requests can be answered, or can wait for a replica that is started for them."""
        logger.info("ingress %s waits for replicas of %s", self._ingress_id, ", ".join(self._pools))
        deadline: float | None = None
        while missing := [name for name, pool in self._pools.items() if not (pool.live() or self._may_sleep[name])]:
            if len(missing) < len(self._pools) and deadline is None:
                deadline = time.monotonic() + READY_WAIT_S
            if deadline is not None and time.monotonic() > deadline:
                logger.warning("ready without a replica of %s", ", ".join(missing))
                break
            await asyncio.sleep(0.05)
        for name, pool in self._pools.items():
            self.models[name].max_kv_tokens = pool.kv_tokens
            self._names.set_adapters(name, pool.adapters)
        logger.info("ingress %s ready: %s", self._ingress_id, ", ".join(self._pools))


async def _load_adapter(admin: Any, model: str, name: str, path: str) -> MantaError | None:
    """The Admin's answer, or that there was none."""
    try:
        answer: MantaError | None = await call(
            admin.options(method_name="load_adapter"), model, name, path, timeout_s=TIMEOUT_S
        )
    except LOST as error:
        return EngineDeadError(f"the Admin does not answer ({type(error).__name__})")
    return answer
