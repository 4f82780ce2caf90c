"""Makes what an ingress says of a request to the Router's admission, and what the client is told when it is refused."""

from __future__ import annotations

import time

from app.deployments.ingress.continuation import Continuation
from app.deployments.routing.claim import Claim, Rejection
from app.errors import DeadlineError, OverloadedError, ServerOverloadedError
from app.records.request import EngineRequest

_REASONS = {
    "tenant": "you have more work waiting than others; its turn would come in about {0:.0f} s",
    "server": "the server has more work than it can do; the request's turn would come in about {0:.0f} s",
    "retry": "too many requests are sent again; those that come for the first time go before",
}


def claim_of(way: Continuation) -> Claim | None:
    """That of a request which no replica has begun; None for one that goes on. DeadlineError when it is too late."""
    if way.has_moved:
        return None
    request = way.request
    place, left_s = request.placement, seconds_left(request)
    is_retry = bool(way.left) or place.num_retries > 0
    until_first_token = place.deadline is not None and place.deadline.until_first_token
    return Claim(place.service_class, place.tenant, left_s, until_first_token, is_retry, may_wait=bool(way.left))


def seconds_left(request: EngineRequest) -> float | None:
    """Until the deadline of a request that no replica has taken; None where it has none. DeadlineError when it is too
    late."""
    deadline = request.placement.deadline
    if deadline is None:
        return None
    left_s = deadline.timeout_s - max(0.0, time.time() - request.arrival_time)
    if left_s <= 0:
        raise DeadlineError(f"no replica took the request within its deadline of {deadline.timeout_s:.3g} s")
    return left_s


def rejection_error(rejection: Rejection) -> OverloadedError:
    """429 for a tenant that asks for more than the others, 503 where the server is the one that has too much."""
    text = _REASONS[rejection.reason].format(rejection.wait_s)
    kind = OverloadedError if rejection.reason == "tenant" else ServerOverloadedError
    return kind(text, retry_after_s=rejection.retry_after_s)
