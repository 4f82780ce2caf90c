"""Tells whether a balancer should send requests to this ingress replica (/ready)."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray._private.worker import global_worker

from app.deployments.channel.replica_pool import ReplicaPool


def why_not_ready(pools: Mapping[str, ReplicaPool], *, is_full: bool, is_leaving: bool = False) -> str | None:
    """None when every model has a replica that answers and that no operator holds, and this ingress takes requests.
    `pools`, by model, are those of models that always have replicas."""
    if is_leaving or is_draining():
        return "this ingress replica is being taken out of service"
    if is_full:
        return "this ingress replica has as many requests in flight as it takes"
    for model, pool in pools.items():
        loads = [channel.load for channel in pool.live().values()]
        if not loads:
            return f"no replica of {model} takes requests"
        if why := pool.held:
            return f"requests to {model} wait: {why}"
        if not any(load is not None and load.answers for load in loads):
            return f"no replica of {model} has given an output lately, nor answered its canary"
    return None


def is_draining() -> bool:
    """True if Serve has begun to stop the replica that this process is. It tells no replica, so its actor is asked."""
    if not ray.is_initialized():
        return False
    actor = global_worker.actors.get(global_worker.actor_id)
    return bool(getattr(getattr(actor, "_replica_impl", None), "_shutting_down", False))
