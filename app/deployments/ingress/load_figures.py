"""Adds up what the engine replicas say of their load, for gateways that choose between servers."""

from __future__ import annotations

from collections.abc import Iterable

from app.deployments.channel.replica_pool import ReplicaPool
from app.records.load_report import LoadReport


def load_figures(pools: Iterable[ReplicaPool]) -> dict[str, float]:
    """The load of the replicas that take requests, under the names of vLLM's ORCA header.

    Requests are those of all models; the cache is that of the model whose replicas have the least of it left, as
    nobody knows which model the next request is for.
    """
    models = [[load for channel in pool.live().values() if (load := channel.load)] for pool in pools]
    loads = [load for model in models for load in model]
    return {
        "kv_cache_usage_perc": max((_cache_usage(model) for model in models if model), default=0.0),
        "num_requests_waiting": float(sum(load.num_waiting for load in loads)),
        "num_requests_running": float(sum(load.num_running for load in loads)),
    }


def _cache_usage(loads: list[LoadReport]) -> float:
    slots = sum(load.num_blocks * load.block_size for load in loads)
    return round(sum(load.resident_tokens for load in loads) / slots, 4) if slots else 0.0
