"""Routing policies by their names in the configuration: one file here and one line in app/backends.py each."""

from __future__ import annotations

from app.backends import ROUTING_POLICIES
from app.deployments.routing.policies.base import RoutingPolicy


def create_policy(name: str) -> RoutingPolicy:
    """A fresh instance of the policy registered under `name`; UnsupportedError lists what exists."""
    policy: RoutingPolicy = ROUTING_POLICIES.load(name)()
    return policy
