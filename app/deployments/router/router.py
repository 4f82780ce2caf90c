"""The Router deployment: says which replica shall take a request, by small calls that requests share, never on
the token path.

It listens to every engine replica: loads and KV events come down one feed each, and every Router replica has feeds of
its own, so all hold the same index. Ingresses ask, with a small time budget, and choose by themselves when no answer
comes. So a dead Router costs placement quality, never a request.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from app.config.admission import CLASS_NAMES, AdmissionConfig
from app.config.router import RouterConfig
from app.deployments.channel.feed_pool import FeedPool
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.serve_port import EngineHandles
from app.deployments.process.serve_logs import log_to_serve_files
from app.deployments.process.start_errors import logs_start_error
from app.deployments.router.admission import Admission, Answer
from app.deployments.router.question import Question
from app.deployments.router.retry_budget import RetryBudget
from app.deployments.router.route_explanation import RouteExplanation, explain
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.prefix_index import PrefixIndex
from app.errors import EngineDeadError
from app.heap import settle_heap
from app.telemetry.metrics_recorder import MetricsRecorder

PING_TIMEOUT_S = 1.0
_ADMISSION = AdmissionConfig()

logger = logging.getLogger("manta.router")


class Router:
    """One load book with its index per model. `engines` are Serve handles by model name."""

    @logs_start_error("the router")
    async def __init__(  # type: ignore[misc]
        self, config: RouterConfig, engines: Mapping[str, Any], admission: AdmissionConfig = _ADMISSION
    ) -> None:
        log_to_serve_files()
        self._router_id = f"router-{uuid.uuid4().hex[:12]}"
        self._config = config
        self._recorder = MetricsRecorder({"router": self._router_id}, scope="router")
        self._pools = {model: self._create_pool(model, EngineHandles(handle)) for model, handle in engines.items()}
        for pool in self._pools.values():
            pool.finder.start()
        self._logged: set[type[Exception]] = set()
        budget = RetryBudget(admission.retry_share, admission.min_retries_per_s)
        self._admissions = {model: Admission(admission, pool.book, budget) for model, pool in self._pools.items()}
        settle_heap()

    async def route(self, questions: list[Question]) -> list[Answer | None]:
        """Decides which replica shall serve each request, or whether it has to wait or to go; None when the Router
        knows no replica, or fails at this one. Feeds and other ingresses have their turn between the answers."""
        answers: list[Answer | None] = []
        for question in questions:
            if answers:
                await asyncio.sleep(0)
            answers.append(self._answer_or_none(question))
        return answers

    def _answer_or_none(self, question: Question) -> Answer | None:
        """None, too, for a question that fails: the others in its call have their answers all the same."""
        try:
            return self._answer(question)
        except Exception as error:
            if type(error) not in self._logged:  # once a kind: such requests may come often
                self._logged.add(type(error))
                logger.exception("a question about model %r failed; its ingress places the request", question.model)
            return None

    def _answer(self, question: Question) -> Answer | None:
        model, excluded = question.model, question.excluded
        allowed = self._pools[model].book.names - set(excluded) if excluded else None
        return self._admissions[model].answer(question.query, question.claim, allowed)

    async def explain(self, question: Question) -> RouteExplanation:
        """Explains what `route` would answer and why; nothing is counted."""
        return explain(self._pools[question.model].book, question.query, self._config.policy)

    async def metrics_snapshot(self) -> bytes:
        """This replica's metrics, for any ingress to render."""
        recorder = self._recorder
        for model, pool in self._pools.items():
            recorder.set("manta:router_feeds", pool.num_feeds, model)
            recorder.set("manta:router_event_batches_total", pool.num_batches, model)
            recorder.set("manta:router_event_gaps_total", pool.num_gaps, model)
            for name in CLASS_NAMES:
                recorder.set("manta:queue_seconds_estimated", self._admissions[model].queue_s(name), model, name)
            if (index := pool.book.index) is not None:
                recorder.set("manta:router_index_blocks", len(index), model)
                recorder.set("manta:router_speculative_blocks", index.num_speculative, model)
                recorder.set("manta:router_index_evicted_total", index.num_evicted, model)
        return recorder.snapshot()

    async def check_health(self) -> None:
        """Serve's health check."""
        for pool in self._pools.values():
            if not pool.finder.is_searching:
                raise EngineDeadError(f"the search for replicas of {pool.model} has ended")

    async def __del__(self) -> None:
        """Serve calls it once the replica is drained."""
        for pool in getattr(self, "_pools", {}).values():
            await pool.close()

    def _create_pool(self, model: str, handles: EngineHandles) -> FeedPool:
        config = self._config
        index = PrefixIndex(config.index_max_blocks, config.speculative_life_s)

        async def discover() -> Discovery:
            return await handles.ping(self._router_id, PING_TIMEOUT_S)

        book = LoadBook(create_policy(config.policy), index=index)
        return FeedPool(model, self._router_id, book, discover, handles.port)
