"""Decides which replica takes a request, or why it has to wait or to go: one model's, in a Router.

A request that would wait longer than its deadline or its class allows is refused when it comes, before anything is
spent on it, and told when it may come again. While nothing waits, this costs one comparison.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection

from app.config.admission import CLASS_NAMES, AdmissionConfig
from app.deployments.router.queue_wait import QueueWait, expected_output
from app.deployments.router.retry_budget import RetryBudget
from app.deployments.routing.claim import NO_CLAIM, Claim, Rejection, Wait
from app.deployments.routing.load_book import Choice, LoadBook
from app.deployments.routing.policies.base import Decision, ReplicaLoad, RouteQuery

Answer = Decision | Wait | Rejection
RETRY_WAIT_S = 0.5
MOST_RETRY_AFTER_S = 60.0  # SDKs give up where they would have to wait two minutes
JITTER = 0.2
DOUBT = 1.5  # times the estimated wait has to fit before a deadline: waits spread by a third around it


class Admission:
    """`answer` is asked once for each prompt."""

    def __init__(
        self, config: AdmissionConfig, book: LoadBook, budget: RetryBudget, rng: random.Random | None = None
    ) -> None:
        self._book = book
        self._budget = budget
        self._random = rng or random.Random()
        self._limits_s: dict[str, float] = {name: getattr(config, name).max_wait_s or math.inf for name in CLASS_NAMES}

    def answer(
        self, query: RouteQuery, claim: Claim | None = None, allowed: Collection[str] | None = None
    ) -> Answer | None:
        """A replica, whose request it then is; None when none is known. Without a claim nothing is refused: the request
        has been running already."""
        if claim is not None and (refusal := self._check_budget(claim)) is not None:
            return refusal
        choice = self._book.decide(query, allowed)
        if choice is None:
            return None
        decision = choice.decision
        if claim is not None and (late := self._late_at(decision, query, claim)) is not None:
            other = self._least_waiting(choice)
            if self._late_at(other, query, claim) is not None:
                return late
            decision = other
        self._book.count_request(decision.replica_id, query, decision.match, claim or NO_CLAIM)
        return decision

    def refusal(self, query: RouteQuery, claim: Claim, allowed: Collection[str] | None = None) -> Rejection | None:
        """Why no replica that is known would serve the request in time; nothing is counted, and retries are not."""
        choice = self._book.decide(query, allowed)
        if choice is None or (late := self._late_at(choice.decision, query, claim)) is None:
            return None
        return late if self._late_at(self._least_waiting(choice), query, claim) is not None else None

    def queue_s(self, service_class: str) -> float:
        """Seconds of a class's work that wait, on an average replica."""
        loads = self._book.replicas()
        return sum(QueueWait(load).total_s(service_class) for load in loads) / len(loads) if loads else 0.0

    def _check_budget(self, claim: Claim) -> Wait | Rejection | None:
        if not claim.is_retry:
            self._budget.count_first()
        elif not self._budget.take():
            after_s = self._jittered(RETRY_WAIT_S)
            return Wait(after_s) if claim.may_wait else Rejection("retry", after_s, max(1.0, after_s))
        return None

    def _least_waiting(self, choice: Choice) -> Decision:
        load = min(choice.candidates, key=lambda one: QueueWait(one).total_s())
        return Decision(load.report.replica_id, "load")

    def _late_at(self, decision: Decision, query: RouteQuery, claim: Claim) -> Rejection | None:
        return self._late(self._book.load(decision.replica_id), query, claim, sum(decision.match))

    def _late(self, load: ReplicaLoad, query: RouteQuery, claim: Claim, num_blocks: int) -> Rejection | None:
        """Why the request would be served too late there; None: it would not, as far as can be told."""
        left_s = math.inf if claim.time_left_s is None else claim.time_left_s
        limit_s = self._limits_s.get(claim.service_class.name, math.inf)
        if claim.may_wait or (limit_s == math.inf == left_s) or (not load.has_queue and left_s == math.inf):
            return None
        queue = QueueWait(load)
        if not queue.is_measured:
            return None
        prefill = max(1, query.num_prompt_tokens - num_blocks * load.report.block_size)
        wait_s = queue.wait_s(claim, prefill, query.max_tokens)
        if wait_s <= limit_s and DOUBT * wait_s + queue.service_s(claim, prefill, expected_output(query)) <= left_s:
            return None
        after_s = min(max(self._jittered(wait_s), 1.0), MOST_RETRY_AFTER_S)
        return Rejection("tenant" if queue.is_above_others(claim) else "server", wait_s, after_s)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(1 - JITTER, 1 + JITTER)
