"""The Ingress deployment: the HTTP application over all models' engine replicas. It owns the requests.

It asks the Router which replica shall take a prompt, hands its requests over, and streams what the replica's channel
brings. A replica that dies before the first token costs the client nothing: the request goes to another one. A dead
Router costs placement only. The event loop is shared with Serve's control plane and is never blocked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve

from app.api.engine_client import RouteInfo, ServedModel
from app.api.events import ENDED_BY
from app.api.served_models import load_served_model
from app.config import ServeConfig
from app.deployments.announcement import announce
from app.deployments.channel.channel_client import ChannelClient, RequestStream
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.channel.serve_port import EngineHandles, call
from app.deployments.cluster_secret import load_block_hash_key
from app.deployments.haproxy import warn_of_lost_settings
from app.deployments.metrics_collector import MetricsCollector
from app.deployments.routing.policies.base import EXPECTED_TOKENS, Decision, Level, RouteQuery
from app.deployments.routing.prompt_hasher import PromptHasher
from app.deployments.routing.route_explanation import RouteExplanation
from app.deployments.serve_logs import log_to_serve_files
from app.deployments.start_errors import logs_start_error
from app.deployments.tenant_store import SharedStores
from app.engine.outputs import EngineOutput, FinishReason
from app.engine.request import EngineRequest
from app.errors import EngineDeadError, ModelNotFoundError, OverloadedError, PoisonedRequestError
from app.telemetry.metrics import MetricsRecorder

PING_TIMEOUT_S = 2.0
EXPLAIN_TIMEOUT_S = 2.0
ROUTER_REST_S = 1.0  # a Router that did not answer is not asked again for so long
MAX_DEATHS = 2  # engine replicas that may die under one request
READY_WAIT_S = 60.0  # once one model can answer, the others get so long before the ingress opens without them

logger = logging.getLogger("manta.ingress")


class Ingress:
    """Implements EngineClient. `engines` and `router` are Serve handles."""

    @logs_start_error("the ingress")
    async def __init__(  # type: ignore[misc]  # Serve awaits an asynchronous constructor
        self,
        config: ServeConfig,
        router: Any,
        engines: Mapping[str, Any],
    ) -> None:
        log_to_serve_files()
        self._config = config
        self._router = router.options(method_name="route")
        self._explain = router.options(method_name="explain")
        self._router_asleep_until = 0.0
        self._ingress_id = uuid.uuid4().hex[:12]
        self._num_requests = 0
        self._recorder = MetricsRecorder({"ingress": self._ingress_id}, scope="ingress")
        self._handles = {name: EngineHandles(handle) for name, handle in engines.items()}
        self._metrics = MetricsCollector(self._recorder.labels, self._snapshot, self._handles, router)
        self._pools = {name: self._create_pool(name) for name in self._handles}
        for pool in self._pools.values():
            pool.finder.start()
        self.models: dict[str, ServedModel] = {}
        for model in config.models:
            served = await asyncio.to_thread(load_served_model, model)
            for name in (model.name, *model.aliases):
                self.models[name] = served
        self._hasher = PromptHasher(await asyncio.to_thread(load_block_hash_key))
        self._needs_key = False
        self._stores = SharedStores(serve.get_replica_context().app_name, config.ingress)
        self._app = await asyncio.to_thread(self._create_app)  # while the engines start
        await self._wait_ready()
        self._app.state.batch_runner.start(self._stores.exists)
        self._announcement = self._announce()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls it after the constructor."""
        return self._app

    def _create_app(self) -> FastAPI:
        """Runs in a thread: it imports much. ConfigError when the keys cannot be read."""
        from app.api.app import create_app
        from app.api.auth import ApiKeys
        from app.api.debug import debug_routes
        from app.api.server_info import server_info_routes

        ingress = self._config.ingress
        keys = ApiKeys.load(ingress)
        logger.info("API keys: %s", keys.num_keys or "none, the server is open to everybody who can reach it")
        self._needs_key = keys.required
        app: FastAPI = create_app(self, ingress.limits, ingress, keys, self._stores.stores())
        app.state.server_adds_request_id = True  # Serve's own middleware, to what it is sent
        if ingress.admin:
            app.include_router(debug_routes(self, ingress.limits))
            app.include_router(server_info_routes(self._config))
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
        served = self.models.get(model)
        if served is None:
            raise ModelNotFoundError(f"no model is served under the name {model!r}", param="model")
        if self._num_requests >= self._config.ingress.limits.max_waiting_requests:
            self._recorder.increment("manta:ingress_rejections_total")
            raise OverloadedError(f"{self._num_requests} requests are in flight in this ingress replica; try later")
        if served.max_kv_tokens is None:  # the ingress opened without a replica of this model
            served.max_kv_tokens = self._pools[served.name].kv_tokens
        self._num_requests += 1
        try:
            async with aclosing(self._attempts(served.name, request, route or RouteInfo())) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._num_requests -= 1

    async def is_healthy(self) -> bool:
        """True only if every served model has a replica that can make progress."""
        return all(pool.live() for pool in self._pools.values())

    async def metrics_text(self) -> str:
        """The metrics of all engine, Router and ingress replicas."""
        return await self._metrics.text()

    async def metrics_snapshot(self) -> bytes:
        """The metrics of this ingress replica, for another one's page."""
        return self._snapshot()

    def _snapshot(self) -> bytes:
        self._recorder.set("manta:ingress_requests", self._num_requests)
        self._recorder.set("manta:ingress_channels", sum(len(pool.live()) for pool in self._pools.values()))
        self._recorder.set("manta:ingress_channels_lost_total", sum(pool.num_lost for pool in self._pools.values()))
        return self._recorder.snapshot()

    async def explain_route(
        self, model: str, prompt_token_ids: list[int], root: bytes, max_tokens: int, session: str
    ) -> dict[str, Any]:
        """See RouteExplainer.explain_route."""
        hashes = await self._hasher.hash_prompt(prompt_token_ids, root, self._pools[model].load)
        query = RouteQuery(len(prompt_token_ids), min(max_tokens, EXPECTED_TOKENS), hashes, session)
        try:
            answer: RouteExplanation = await call(self._explain, *_arguments(model, query), timeout_s=EXPLAIN_TIMEOUT_S)
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

    async def _attempts(
        self, model: str, request: EngineRequest, route: RouteInfo
    ) -> AsyncGenerator[EngineOutput, None]:
        """The request on one replica; on another one if the first refuses it or is lost before it said anything.

        PoisonedRequestError once MAX_DEATHS replicas died with it: it may be the cause, and a third would die too.
        """
        failed: set[str] = set()
        num_deaths = 0
        while True:
            channel = await self._choose(model, request, route, failed)
            silent = True
            stream: RequestStream | None = None
            try:
                stream = await channel.submit(request)
                route.replica_id = channel.replica_id
                async for output in stream.outputs():
                    silent = False
                    yield output
                return
            except EngineDeadError as error:
                failed.add(channel.replica_id)
                if not silent:
                    raise
                num_deaths += stream is not None or channel.state == "closed"
                if num_deaths == MAX_DEATHS:
                    raise PoisonedRequestError(
                        f"{MAX_DEATHS} engine replicas died while this request ran on them; it may be the cause, and "
                        f"is not sent to another one (the last said: {error.message})"
                    ) from error
            finally:
                if stream is not None:
                    stream.close(cast(FinishReason, route.extra.get(ENDED_BY, "abort")))

    async def _choose(self, model: str, request: EngineRequest, route: RouteInfo, failed: set[str]) -> ChannelClient:
        """The replica of the prompt's place; the first choice finds one, and so does who finds that one lost."""
        pool, place = self._pools[model], route.place
        async with place.lock:
            live = self._live(model, failed)
            if place.replica_id not in live:
                decision = None if failed else await self._ask_router(model, request)
                live = self._live(model, failed)
                query = RouteQuery.of_prompt(request)
                level: Level = "ingress"
                if decision is not None and decision.replica_id in live:
                    place.replica_id, level = decision.replica_id, decision.level
                    pool.routed(decision.replica_id, query)
                else:
                    self._recorder.increment("manta:ingress_route_fallbacks_total")
                    place.replica_id = pool.choose(query, live)
                self._recorder.increment("manta:ingress_routes_total", 1.0, level)
            return live[place.replica_id]

    def _live(self, model: str, failed: set[str]) -> dict[str, ChannelClient]:
        live = {name: channel for name, channel in self._pools[model].live().items() if name not in failed}
        if not live:
            raise EngineDeadError(f"no engine replica of model {model!r} can take requests at the moment")
        return live

    async def _ask_router(self, model: str, request: EngineRequest) -> Decision | None:
        """The Router's choice; None when it has none or does not answer in time."""
        if time.monotonic() < self._router_asleep_until:
            return None
        load = self._pools[model].load
        hashes = await self._hasher.hash_prompt(request.prompt_token_ids, request.placement.cache_root, load)
        query = dataclasses.replace(RouteQuery.of_prompt(request), block_hashes=hashes)
        timeout_s = self._config.ingress.route_timeout_s
        try:
            choice: Decision | None = await call(self._router, *_arguments(model, query), timeout_s=timeout_s)
        except Exception as error:
            if time.monotonic() >= self._router_asleep_until:  # the first of those that wait for it
                logger.info("the Router did not answer (%s); placing requests here", type(error).__name__)
            self._router_asleep_until = time.monotonic() + ROUTER_REST_S
            return None
        return choice

    def _create_pool(self, model: str) -> ReplicaPool:
        handles = self._handles[model]

        async def discover() -> Discovery:
            return await handles.ping(self._ingress_id, PING_TIMEOUT_S)

        return ReplicaPool(model, self._ingress_id, self._config.ingress, discover, handles.port)

    async def _wait_ready(self) -> None:
        """Begin to accept only when requests can be answered."""
        logger.info("ingress %s waits for replicas of %s", self._ingress_id, ", ".join(self._pools))
        deadline: float | None = None
        while missing := [name for name, pool in self._pools.items() if not pool.live()]:
            if len(missing) < len(self._pools) and deadline is None:
                deadline = time.monotonic() + READY_WAIT_S
            if deadline is not None and time.monotonic() > deadline:
                logger.warning("ready without a replica of %s", ", ".join(missing))
                break
            await asyncio.sleep(0.05)
        for name, pool in self._pools.items():
            self.models[name].max_kv_tokens = pool.kv_tokens
        logger.info("ingress %s ready: %s", self._ingress_id, ", ".join(self._pools))


def _arguments(model: str, query: RouteQuery) -> tuple[str, int, int, bytes, str, str]:
    """The arguments of Router.route: one bytes object of all hashes is cheaper to send than many."""
    hashes = b"".join(query.block_hashes)
    return (model, query.num_prompt_tokens, query.max_tokens, hashes, query.session, query.adapter)
