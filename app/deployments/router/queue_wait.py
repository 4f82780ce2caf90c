"""Estimates how long a request would wait for its turn on a replica: what waits there, served as the engine's queue
serves it.

The engine shares its work out among classes by their shares, and in a class evenly among the tenants that wait
(app/engine/scheduler/waiting_queue.py). So of each other tenant goes first what it has waiting, but no more than the
tenant itself has; of each other class what it has, but no more than its share against the own class's (generalized
processor sharing: Parekh and Gallager, 1993). Work is in seconds of the engine, and runs off at the rate that the
engine measures. A tenant whose own queue runs off more slowly than that waits as long as that takes, its own request
included, for which its turns have to suffice as well: others will go on coming.
"""

from __future__ import annotations

from collections.abc import Iterator

from app.deployments.routing.claim import Claim
from app.deployments.routing.policies.base import ReplicaLoad, RouteQuery
from app.records.request import ServiceClass

LEAST_RATE, MOST_RATE = 0.1, 1.0  # seconds of work that may begin in a second: what is measured beyond is noise
OWN_DOUBT = 1.6  # times its own queue's time, where others take turns: its rate falls when more of them come
ALONE = 0.9  # of what begins: a tenant that gets as much shares with nobody


class QueueWait:
    """One replica's queue, by class and tenant."""

    def __init__(self, load: ReplicaLoad) -> None:
        report = load.report
        self._token_s = report.prefill_token_s
        num_sharing = max(1, min(report.max_num_seqs, load.num_requests))
        self._output_token_s = report.decode_step_s / num_sharing
        self._step_s = report.decode_step_s
        self._rate = min(max(report.begun_rate or 1.0, LEAST_RATE), MOST_RATE)
        self._queued_prefill_s = (report.queued_prefill_tokens + load.routed_prefill_tokens) * self._token_s
        self._shares: dict[str, float] = {}
        self._work: dict[str, dict[str, float]] = {}
        self._rates: dict[tuple[str, str], float] = {}
        for queue in report.queued:
            self._add(ServiceClass(queue.service_class, queue.share), queue.tenant, queue.work_s)
            self._rates[queue.service_class, queue.tenant] = queue.rate
        for claim, prefill_tokens, output_tokens in _without_room(load):
            self._add(claim.service_class, claim.tenant, self._work_s(prefill_tokens, output_tokens))

    @property
    def is_measured(self) -> bool:
        """True if the engine knows yet how fast it is."""
        return self._token_s > 0 and self._step_s > 0

    def total_s(self, service_class: str | None = None) -> float:
        """All that waits, or what waits of one class, in seconds until it has begun."""
        classes = self._work.values() if service_class is None else [self._work.get(service_class, {})]
        return sum(sum(tenants.values()) for tenants in classes) / self._rate

    def wait_s(self, claim: Claim, prefill_tokens: float, output_tokens: float) -> float:
        """Seconds until a request would begin that comes now."""
        if not self._work:
            return self._queued_prefill_s
        own_s = self._work_s(prefill_tokens, output_tokens)
        tenants = self._work.get(claim.service_class.name, {})
        before_s = tenants.get(claim.tenant, 0.0)
        in_class_s = before_s + sum(
            min(work_s, before_s + own_s) for tenant, work_s in tenants.items() if tenant != claim.tenant
        )
        ahead_s = in_class_s
        for name, others in self._work.items():
            if name != claim.service_class.name:
                ratio = self._shares[name] / claim.service_class.share
                ahead_s += min(sum(others.values()), (in_class_s + own_s) * ratio)
        own_rate = self._rates.get((claim.service_class.name, claim.tenant), 0.0)
        own_queue_s = (before_s + own_s) / max(own_rate, LEAST_RATE * self._rate) if own_rate else 0.0
        doubt = 1.0 if own_rate >= ALONE * self._rate else OWN_DOUBT
        return max(ahead_s / self._rate, doubt * own_queue_s)

    def service_s(self, claim: Claim, prefill_tokens: float, output_tokens: float) -> float:
        """Seconds from there to what the claim's deadline is for: the first token, or the end."""
        return prefill_tokens * self._token_s + (0.0 if claim.until_first_token else output_tokens * self._step_s)

    def is_above_others(self, claim: Claim) -> bool:
        """True if the tenant has more waiting than the others of its class have on average."""
        tenants = self._work.get(claim.service_class.name, {})
        others = [work_s for tenant, work_s in tenants.items() if tenant != claim.tenant]
        return bool(others) and tenants.get(claim.tenant, 0.0) > sum(others) / len(others)

    def _add(self, service_class: ServiceClass, tenant: str, work_s: float) -> None:
        tenants = self._work.setdefault(service_class.name, {})
        tenants[tenant] = tenants.get(tenant, 0.0) + work_s
        self._shares[service_class.name] = service_class.share

    def _work_s(self, prefill_tokens: float, output_tokens: float) -> float:
        return prefill_tokens * self._token_s + output_tokens * self._output_token_s


def _without_room(load: ReplicaLoad) -> Iterator[tuple[Claim, float, float]]:
    """Requests sent since the last report, or parts of them, for which there was no row any more."""
    report = load.report
    num_free = max(0, report.max_num_seqs - report.num_running - report.num_waiting)
    for routed in load.routed:
        num_free -= routed.num_prompts
        if num_free < 0:
            share = min(1.0, -num_free / routed.num_prompts)
            output_tokens = routed.tokens - routed.prompt_tokens
            yield routed.claim, share * routed.prefill_tokens, share * output_tokens


def expected_output(query: RouteQuery) -> int:
    """Tokens of the longest of the prompt's answers."""
    return query.max_tokens // max(1, query.num_choices)
