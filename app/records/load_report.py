"""Says how busy one engine replica is: its heartbeat to routers and ingresses, which routing decides on."""

from __future__ import annotations

import msgspec

from app.records.adapter import NO_ADAPTERS, AdapterState
from app.records.stats import QueuedWork


class LoadReport(msgspec.Struct, array_like=True, frozen=True):
    """Says how busy one engine replica is: the heartbeat to routers and ingresses."""

    model: str
    replica_id: str
    incarnation: str  # drawn anew by each process: a report of a replaced one is recognised
    accepting: bool  # False while it drains or cannot make progress
    num_running: int
    num_waiting: int
    outstanding_tokens: int  # prefill still to compute, plus what running requests may still generate
    num_blocks: int
    block_size: int
    index: int  # `engine` label of its metrics
    queued_prefill_tokens: int = 0  # known tokens still to compute, of running and waiting requests
    resident_tokens: int = 0  # slots of the blocks that requests hold
    max_num_seqs: int = 128
    prefill_token_s: float = 0.0  # measured seconds per prefill token; 0 until there is a measurement
    decode_step_s: float = 0.0  # measured seconds of a step that only decodes
    answers: bool = True  # it has given an output lately, if only to its own canary
    model_revision: str = ""  # the checkpoint's: what block hashes begin with; empty where nothing is cached
    queued: tuple[QueuedWork, ...] = ()  # what waits of each tenant in each class, those of most work
    begun_rate: float = 0.0  # seconds of queued work that begin in a second; 0 until measured
    weights: str = ""  # their revision, also where nothing is cached: no other ones go on with a request's tokens
    adapters: AdapterState = NO_ADAPTERS  # that it serves beside its model
    held: str = ""  # why an operator has new requests wait there; empty where they do not
    address: tuple[str, int] | None = None  # where ingresses connect for their channels; None: nowhere
