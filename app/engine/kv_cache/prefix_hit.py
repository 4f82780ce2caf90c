"""Holds what the prefix cache has of a waiting request: found before anything is taken, handed back when it is
admitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOADED = -1  # in a table: the connector has the block


@dataclass(slots=True, frozen=True)
class PrefixHit:
    """The blocks of a request that need no computing."""

    table: Sequence[int] = ()  # its block ids so far, in the layout of `Request.block_ids`; LOADED where it is loaded
    held: Sequence[int] = ()  # those of them on the device
    num_blocks: int = 0  # of its tokens, those that are loaded included
    num_loads: int = 0  # how many of these the connector brings back
    state: Sequence[int] = ()  # blocks of the state behind it, where layers keep any; LOADED where it is loaded

    @classmethod
    def of(cls, table: Sequence[int], state: Sequence[int] = ()) -> PrefixHit:
        """Makes the hit of a model with one group of layers."""
        held = [block for block in table if block != LOADED] if LOADED in table else table
        return cls(table, held, len(table), len(table) - len(held), state)


NO_HIT = PrefixHit()
