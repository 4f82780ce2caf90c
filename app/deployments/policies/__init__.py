"""Routing policies: the table. One file and one line per policy."""

from __future__ import annotations

from app.deployments.policies.base import RoutingPolicy
from app.registry import Registry

POLICIES: Registry[type[RoutingPolicy]] = Registry(
    "routing policy",
    {
        "adapter_affinity": "app.deployments.policies.adapter_affinity:AdapterAffinity",
        "least_outstanding_tokens": "app.deployments.policies.least_outstanding_tokens:LeastOutstandingTokens",
        "power_of_two": "app.deployments.policies.power_of_two:PowerOfTwo",
        "prefix_aware": "app.deployments.policies.prefix_aware:PrefixAware",
        "round_robin": "app.deployments.policies.round_robin:RoundRobin",
        "session_affinity": "app.deployments.policies.session_affinity:SessionAffinity",
    },
)


def create_policy(name: str) -> RoutingPolicy:
    """A fresh instance of the policy registered under `name`; UnsupportedError lists what exists."""
    return POLICIES.load(name)()
