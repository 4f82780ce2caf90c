"""Messages between the two halves of the KV connector `host_memory`: its report from a worker, its copies in a step."""

from __future__ import annotations

from dataclasses import dataclass

from app.records.step import Int32Array


@dataclass(slots=True)
class KVTransfers:
    """KV blocks to copy between the device and the workers' host pools, before the step message's step.

    In the order of stores, loads, step: a store reads what the blocks held before the step message, a load may read
    what the same step message stored. No slot is stored to twice in one step message, and none is both loaded from and
    then given away.
    """

    store_blocks: Int32Array  # [n] device blocks
    store_slots: Int32Array  # [n] host slots that they go to
    load_slots: Int32Array  # [m] host slots
    load_blocks: Int32Array  # [m] device blocks that they go to, each held by a request that has not computed yet


@dataclass(slots=True, frozen=True)
class HostPoolReport:
    """The pool of one worker."""

    num_blocks: int
    block_bytes: int  # of this rank's share of a block
