"""Weights from another process, which broadcasts them to all workers (app/distributed/weight_transfer.py)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from app.engine.control.weights import refusing_once_failed
from app.engine.core import EngineCore
from app.errors import InvalidRequestError

MAX_TENSORS = 1 << 16  # in one call
MAX_DIMS = 8
Names = Annotated[list[Annotated[str, Field(max_length=512)]], Field(min_length=1, max_length=MAX_TENSORS)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=1 << 40)]], Field(max_length=MAX_DIMS)]


def init_weight_transfer_engine(
    core: EngineCore,
    master_address: Annotated[str, Field(min_length=1, max_length=255)],
    master_port: Annotated[int, Field(ge=1, le=65535)],
    rank_offset: Annotated[int, Field(ge=1)],
    world_size: Annotated[int, Field(ge=2)],
) -> None:
    """Let the workers join the sender's group as ranks `rank_offset`, `rank_offset` + 1, ..., in their order; waits for
    all ranks of all replicas."""
    core.call_workers("join_transfer", master_address, master_port, rank_offset, world_size)


def receive_weights(core: EngineCore, names: Names, dtype_names: Names, shapes: list[Shape]) -> int:
    """Take in as many tensors as there are names, as the sender sends them, between `start_weight_update` and
    `finish_weight_update`; how many."""
    if not len(names) == len(dtype_names) == len(shapes):
        raise InvalidRequestError(
            f"names, dtype_names and shapes: {len(names)}, {len(dtype_names)} and {len(shapes)} entries", param="names"
        )
    with refusing_once_failed(core):
        core.call_workers("receive_tensors", list(zip(names, dtype_names, shapes, strict=True)))
    return len(names)
