"""Routing policies: the table. One file and one line per policy."""

from __future__ import annotations

from app.deployments.routing.policies.base import RoutingPolicy
from app.registry import Registry

POLICIES: Registry[type[RoutingPolicy]] = Registry(
    "routing policy",
    {
        "adapter_affinity": "app.deployments.routing.policies.adapter_affinity:AdapterAffinity",
        "least_outstanding_tokens": "app.deployments.routing.policies.least_outstanding_tokens:LeastOutstandingTokens",
        "power_of_two": "app.deployments.routing.policies.power_of_two:PowerOfTwo",
        "prefix_aware": "app.deployments.routing.policies.prefix_aware:PrefixAware",
        "round_robin": "app.deployments.routing.policies.round_robin:RoundRobin",
        "session_affinity": "app.deployments.routing.policies.session_affinity:SessionAffinity",
    },
)


def create_policy(name: str) -> RoutingPolicy:
    """A fresh instance of the policy registered under `name`; UnsupportedError lists what exists."""
    return POLICIES.load(name)()
