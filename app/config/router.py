"""The Router's options: the section `router` of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from app.backends import ROUTING_POLICIES
from app.config.frozen import Frozen
from app.registry import OneOf


class RouterConfig(Frozen):
    """The choice of replica."""

    policy: Annotated[str, OneOf(ROUTING_POLICIES)] = Field("prefix_aware", description="How a replica is chosen.")
    num_replicas: int = Field(1, ge=1, description="Router replicas.")
    num_cpus: float = Field(0.0, ge=0, description="Ray CPUs reserved for each replica.")
    heartbeat_s: float = Field(
        0.1, gt=0, description="Interval of the engines' load reports and KV events, while they are busy."
    )
    index_max_blocks: int = Field(
        10_000_000, ge=1, description="Most KV blocks per model that a Router remembers, about 120 bytes each."
    )
    speculative_life_s: float = Field(
        4.0, gt=0, description="What a request is about to store is assumed cached for so long at most, until told."
    )
