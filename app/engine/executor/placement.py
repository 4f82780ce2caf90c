"""Finds the bundles that the workers run in: those of the replica's placement group, or of one made here.

In a Serve replica, bundle 0 is the replica's own and worker r takes bundle r + 1. Elsewhere (scripts, tests) a group
of one bundle a worker is made and removed again. What is missing is named at once instead of waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.backends import ON_HOST
from app.config.engine import EngineConfig
from app.errors import ConfigError

logger = logging.getLogger("manta.executor")

_FREE_TIMEOUT_S = 60.0  # the resources exist, but something else uses them


@dataclass(frozen=True, slots=True)
class Placement:
    """One bundle a worker, by rank."""

    group: Any
    bundle_of: list[int]
    resources_of: list[dict[str, float]]
    node_of: list[str]  # Ray node ids
    owned: bool

    def options(self, rank: int, device: str) -> dict[str, Any]:
        """Actor options that put `rank` into its bundle and give it all of it (to the host no GPU)."""
        resources = self.resources_of[rank]
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": 0 if device in ON_HOST else resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundle_of[rank]
            ),
        }

    def local_rank(self, rank: int) -> int:
        """Position of `rank` among the workers of its node."""
        return self.node_of[:rank].count(self.node_of[rank])

    def release(self) -> None:
        """Give back a group made here; Serve's own goes with its replica."""
        if self.owned:
            remove_placement_group(self.group)


def place(config: EngineConfig) -> Placement:
    """Bundles for all workers of `config`; ConfigError names what is missing."""
    world_size = config.tensor_parallel_size * config.pipeline_parallel_size
    group = get_current_placement_group()
    owned = group is None
    if group is None:
        group = _make_group(config, world_size)
    first = 0 if owned else 1
    table = placement_group_table(group)
    bundles = table["bundles"]
    if len(bundles) < first + world_size:
        raise ConfigError(
            f"the placement group has {len(bundles)} bundles; {world_size} workers need {first + world_size}: "
            "the replica's own, and one for each worker",
            param="placement_group_bundles",
        )
    nodes = table["bundles_to_node_id"]
    bundle_of = sort_bundles(range(first, first + world_size), nodes, config.tensor_parallel_size)
    resources_of = [bundles[bundle] for bundle in bundle_of]
    if _names_gpu(config) and any(not resources.get("GPU") for resources in resources_of):
        raise ConfigError(
            f"device={config.device}, but the workers' bundles hold no GPU: set gpus_per_worker", param="device"
        )
    node_of = [nodes[bundle] for bundle in bundle_of]
    _warn_of_split_groups(node_of, config.tensor_parallel_size)
    return Placement(group, bundle_of, resources_of, node_of, owned)


def _names_gpu(config: EngineConfig) -> bool:
    return config.device not in ("auto", *ON_HOST)


def sort_bundles(bundles: Iterable[int], node_of: Mapping[int, str], tensor_parallel_size: int) -> list[int]:
    """Bundles in the order of ranks: each TP group on one node as far as possible, neighbouring stages too.

    `node_of`: bundle -> node. Whole groups come first, node by node; what is left over makes up the last groups.
    """
    by_node: dict[str, list[int]] = {}
    for bundle in bundles:
        by_node.setdefault(node_of[bundle], []).append(bundle)
    whole: list[int] = []
    rest: list[int] = []
    for own in by_node.values():
        count = len(own) // tensor_parallel_size * tensor_parallel_size
        whole += own[:count]
        rest += own[count:]
    return whole + rest


def _warn_of_split_groups(node_of: list[str], tensor_parallel_size: int) -> None:
    for first in range(0, len(node_of), tensor_parallel_size):
        nodes = set(node_of[first : first + tensor_parallel_size])
        if len(nodes) > 1:
            logger.warning(
                "tensor-parallel ranks %d-%d lie on %d nodes: every layer waits for the network between them; use "
                "placement_strategy STRICT_PACK, or stages (pipeline_parallel_size) across nodes",
                *(first, first + tensor_parallel_size - 1, len(nodes)),
            )


def _make_group(config: EngineConfig, world_size: int) -> Any:
    total = ray.cluster_resources()
    bundle = {"CPU": 1.0}
    if _names_gpu(config) or (config.device == "auto" and total.get("GPU", 0) > 0):
        bundle["GPU"] = 1.0
    for name, amount in bundle.items():
        if total.get(name, 0) < amount * world_size:
            raise ConfigError(
                f"{world_size} workers need {amount * world_size:g} {name}, the Ray cluster has "
                f"{total.get(name, 0):g} in all: add nodes, or lower tensor_parallel_size or pipeline_parallel_size",
                param="device" if name == "GPU" else "executor",
            )
    group = placement_group([bundle] * world_size, strategy="PACK")
    if not group.wait(timeout_seconds=_FREE_TIMEOUT_S):
        remove_placement_group(group)
        free = ray.available_resources()
        wanted = ", ".join(
            f"{amount * world_size:g} {name} ({free.get(name, 0):g} free)" for name, amount in bundle.items()
        )
        raise ConfigError(f"no room for the workers within {_FREE_TIMEOUT_S:g} s: they need {wanted}", param="executor")
    return group
