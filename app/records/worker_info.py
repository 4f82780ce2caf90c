"""What a worker is told before it starts and reports afterwards; plain data, so that the host half can read it without
torch (I8)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class WorkerInfo:
    """What the workers found out while they started: the scheduler sizes itself from it."""

    num_blocks: int
    device: str
    dtype: str
    notes: list[str] = field(default_factory=list)  # one line for each choice made and why
    num_host_blocks: int = 0  # in the host-memory tier
    block_bytes: int = 0  # one KV block's size, over all workers; known where there is a host-memory tier
    num_draft_tokens: int = 0  # that the workers propose for a row after each step that samples in it
    # Windows of the groups of layers that keep blocks of their own; None: the whole context (kv_cache/kv_groups.py).
    kv_windows: tuple[int | None, ...] = (None,)


@dataclass(slots=True, frozen=True)
class RendezvousInfo:
    """Where the ranks of a worker group find each other: the store in rank 0; and the node of each rank."""

    address: tuple[str, int]
    node_of: tuple[str, ...]

    def share_a_node(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks share a node."""
        return len({self.node_of[rank] for rank in ranks}) == 1
