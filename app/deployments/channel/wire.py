"""What travels between an ingress and an engine replica: msgpack frames down the channel, control messages up.

Requests are named by a short `stream_id` that the ingress draws per channel and that stands as `request_id` in the
EngineOutputs on their way; the request id that the client knows never travels on the token path.
"""

from __future__ import annotations

import msgspec

from app.engine.kv_cache.kv_events import KVEventBatch
from app.engine.outputs import EngineOutput, FinishReason
from app.engine.stats import QueuedWork
from app.errors import EngineDeadError


class LoadReport(msgspec.Struct, array_like=True, frozen=True):
    """How busy one engine replica is: the heartbeat to routers and ingresses."""

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


class FeedFrame(msgspec.Struct, array_like=True):
    """One message of a feed to a Router: how busy the replica is, and what changed in its prefix cache."""

    load: LoadReport
    events: KVEventBatch | None = None  # the first frame brings a snapshot


class Frame(msgspec.Struct, array_like=True):
    """One message of a channel: all that one engine step brought its ingress."""

    sequence: int  # 0, 1, 2, ...: a gap means that tokens were lost
    outputs: list[EngineOutput]  # `request_id` is the stream id
    load: LoadReport | None = None  # with the first frame, and as a heartbeat
    fatal: str | None = None  # the engine is gone; why
    secluded: bool | None = None  # whether one request has the replica for itself; None: as before


class ControlMessage(msgspec.Struct, array_like=True):
    """Aborts, credits and the lease of one channel, in one call."""

    channel_id: str
    aborts: list[tuple[str, FinishReason]]  # stream id, and what the ingress says the request ended with
    credits: list[tuple[str, int]]  # stream id, tokens consumed so far
    close: bool = False  # end the channel
    draining: bool = False  # this ingress sees that Serve has taken the replica out of service
    shared: tuple[str, ...] = ()  # streams that need not have the replica for themselves any more


class SecludedError(EngineDeadError):
    """The refusal of a replica that another request has for itself."""


def encode(message: msgspec.Struct) -> bytes:
    """Msgpack bytes of any message here."""
    return msgspec.msgpack.encode(message)


# Decoders of the messages' bytes; each raises msgspec.ValidationError when they are something else.
decode_frame = msgspec.msgpack.Decoder(Frame).decode
decode_feed = msgspec.msgpack.Decoder(FeedFrame).decode
decode_control = msgspec.msgpack.Decoder(ControlMessage).decode
