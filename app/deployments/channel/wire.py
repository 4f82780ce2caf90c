"""Defines what travels between an ingress and an engine replica: msgpack frames down the channel, control messages up.

Requests are named by a short `stream_id` that the ingress draws per channel and that stands as `request_id` in the
EngineOutputs on their way; the request id that the client knows never travels on the token path.
"""

from __future__ import annotations

import msgspec

from app.errors import EngineDeadError
from app.records.kv_events import KVEventBatch
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput, FinishReason


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


class Opening(msgspec.Struct, array_like=True):
    """Asks for a channel, over a connection of its own."""

    channel_id: str
    ingress_id: str
    replica_id: str  # that is meant; another one may have got its port


class SecludedError(EngineDeadError):
    """The refusal of a replica that another request has for itself."""


class PixelsGoneError(EngineDeadError):
    """The refusal of a replica that no longer has pixels which a request names by their digest."""


def encode(message: msgspec.Struct) -> bytes:
    """Msgpack bytes of any message here."""
    return msgspec.msgpack.encode(message)


# Decoders of the messages' bytes; each raises msgspec.ValidationError when they are something else.
decode_frame = msgspec.msgpack.Decoder(Frame).decode
decode_feed = msgspec.msgpack.Decoder(FeedFrame).decode
decode_control = msgspec.msgpack.Decoder(ControlMessage).decode
decode_opening = msgspec.msgpack.Decoder(Opening).decode
