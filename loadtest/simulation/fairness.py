"""What an overload run has shown: goodput, fairness, and whether who was let in was served in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


class Request(Protocol):
    """One request of a client. Times in seconds."""

    tenant: str
    at_s: float
    admitted_s: float | None  # None: it was refused each time
    ended_s: float | None
    is_late: bool  # told that its deadline had passed

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness (1984): 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def max_min(demands: dict[str, float], capacity: float) -> dict[str, float]:
    """The max-min fair division of `capacity` (Bertsekas and Gallager, 1992): nobody gets more than they ask for, and
    what one leaves is divided among the others."""
    left, shares = capacity, dict[str, float]()
    for i, (name, demand) in enumerate(sorted(demands.items(), key=lambda pair: pair[1])):
        shares[name] = min(demand, left / (len(demands) - i))
        left -= shares[name]
    return shares


@dataclass(slots=True, frozen=True)
class Outcome:
    """One run, between two moments: the first part of a run, in which queues fill, is left out."""

    num_requests: int  # that clients sent for the first time
    num_admitted: int
    in_time: float  # share of those let in that ended within their deadline
    goodput: float  # tokens a second of requests that ended within their deadline
    goodput_of: dict[str, float]
    demand_of: dict[str, float]  # tokens a second that were sent

    @classmethod
    def of(cls, requests: Iterable[Request], deadline_s: float, begin_s: float, end_s: float) -> Outcome:
        """Goodput is counted where it ends, so that no work from before or after is in it."""
        requests, length_s = list(requests), end_s - begin_s
        admitted = [one for one in requests if one.admitted_s is not None and begin_s <= one.admitted_s < end_s]
        goodput, demand = (dict.fromkeys(sorted({one.tenant for one in requests}), 0.0) for _ in range(2))
        for one in requests:
            if begin_s <= one.at_s < end_s:
                demand[one.tenant] += one.num_tokens / length_s
            if one.ended_s is not None and begin_s <= one.ended_s < end_s and _is_good(one, deadline_s):
                goodput[one.tenant] += one.num_tokens / length_s
        return cls(
            num_requests=sum(begin_s <= one.at_s < end_s for one in requests),
            num_admitted=len(admitted),
            in_time=sum(_is_good(one, deadline_s) for one in admitted) / max(1, len(admitted)),
            goodput=sum(goodput.values()),
            goodput_of=goodput,
            demand_of=demand,
        )

    def fairness(self) -> float:
        """Jain's index of what the tenants got, each measured by its fair part of what all got."""
        parts = max_min(self.demand_of, self.goodput)
        return jain([self.goodput_of[name] / part for name, part in parts.items() if part])

    def as_json(self) -> dict[str, Any]:
        """The fields, and the index."""
        return asdict(self) | {"jain": self.fairness()}


def _is_good(one: Request, deadline_s: float) -> bool:
    if one.admitted_s is None or one.ended_s is None or one.is_late:
        return False
    return one.ended_s - one.admitted_s <= deadline_s
