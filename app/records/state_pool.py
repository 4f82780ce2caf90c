"""Says what the workers keep of requests beside their blocks: states, whose size does not grow with a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class StatePool:
    """Each running request has its states at the place of its row, so there are always enough of these.

    Copies, from which requests with the same prefix go on, lie in blocks of the KV cache; on ranks whose layers keep
    nothing of tokens, in slots. No slots, where none are kept: then prefixes are not found.
    """

    num_bytes: int  # of one request's states
    num_slots: int | None = 0  # for copies; None: they need none
    num_blocks: int = 0  # that hold one copy

    @classmethod
    def joined(cls, pools: Sequence[StatePool]) -> StatePool | None:
        """The states of all ranks, of which some may keep none; those of a request are on every rank or on none."""
        if not pools:
            return None
        slots = [pool.num_slots for pool in pools if pool.num_slots is not None]
        return cls(
            sum(pool.num_bytes for pool in pools),
            min(slots) if slots else None,
            max(pool.num_blocks for pool in pools),
        )
