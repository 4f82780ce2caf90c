"""Holds what a worker is told before it starts and reports afterwards; plain data, so that the host half can read it
torch (I8)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from app.records.state_pool import StatePool


@dataclass(slots=True, frozen=True)
class WorkerInfo:
    """Holds what the workers found out while they started: the scheduler sizes itself from it."""

    num_blocks: int
    device: str
    dtype: str
    notes: list[str] = field(default_factory=list)  # one line for each choice made and why
    # Reports of the KV connector's halves in the workers, by rank, of the connector's own type; (): there is none.
    kv_connector: tuple[Any, ...] = ()
    num_draft_tokens: int = 0  # that the workers propose for a row after each step that samples in it
    num_draft_slots: int = 0  # of the KV cache behind a row's computed tokens that they propose with
    num_deferred: int = 0  # pieces of the start that the workers left for idle time
    # Windows of the groups of layers that keep blocks of their own; None: the whole context (app/records/kv_groups.py).
    kv_windows: tuple[int | None, ...] = (None,)
    states: StatePool | None = None  # None: no layer keeps any
    most_rows: int | None = None  # that requests may be in at once, where that is less than was asked for
    encoder_tokens: int = 0  # that the workers keep of what encoders gave; 0: the model sees nothing

    def num_rows(self, asked: int) -> int:
        """Requests that may be in at once, where so many were asked for."""
        return asked if self.most_rows is None else min(asked, self.most_rows)

    @property
    def finds_prefixes(self) -> bool:
        """False where blocks alone are of no use: layers keep states, and no copies of them are kept."""
        return self.states is None or self.states.num_slots != 0


@dataclass(slots=True, frozen=True)
class RendezvousInfo:
    """Says where the ranks of a worker group find each other: the store in rank 0; and the node of each rank."""

    address: tuple[str, int]
    node_of: tuple[str, ...]

    def share_a_node(self, ranks: Iterable[int]) -> bool:
        """True if these ranks share a node."""
        return len({self.node_of[rank] for rank in ranks}) == 1
