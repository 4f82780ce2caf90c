"""Priorities: they order a tenant's requests of one class among each other, and no other tenant notices."""

from __future__ import annotations

from collections.abc import Iterable

from app.engine.request import Placement
from app.engine.scheduler.request import Request


def deal_keys(requests: Iterable[Request], placement: Placement) -> None:
    """Give the earlier ones of the keys that a tenant's requests have to the more urgent requests."""
    whose = placement.tenant, placement.service_class.name
    own = [
        one
        for one in requests
        if (one.spec.placement.tenant, one.spec.placement.service_class.name) == whose and not one.is_returning
    ]
    own.sort(key=lambda one: (one.spec.placement.priority, one.key))
    for request, key in zip(own, sorted(one.key for one in own), strict=True):
        request.key = key
