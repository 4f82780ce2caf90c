"""What travels between an ingress and an engine replica: msgpack frames down the channel, control messages up.

Requests are named by a `stream_id` (int) that the ingress draws per channel, so a frame stays small; the request id
the client knows never travels on the token path.
"""

from __future__ import annotations

import msgspec

from app.engine.kv_cache.kv_events import KVEventBatch
from app.engine.outputs import EngineOutput, FinishReason, PooledResult
from app.engine.step import TokenLogprobs


class OutputRecord(msgspec.Struct, array_like=True):
    """An EngineOutput whose request is named by the channel's stream id."""

    stream_id: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_time_s: float = 0.0
    pooled: PooledResult | None = None
    error_param: str | None = None

    @classmethod
    def pack(cls, stream_id: int, output: EngineOutput) -> OutputRecord:
        """The record that carries `output`."""
        return cls(
            stream_id,
            output.new_token_ids,
            output.finish_reason,
            output.stop_reason,
            output.error,
            output.logprobs,
            output.prompt_logprobs,
            output.num_cached_tokens,
            output.num_preemptions,
            output.queue_time_s,
            output.pooled,
            output.error_param,
        )

    def unpack(self, request_id: str) -> EngineOutput:
        """The output, under the name that the ingress gave the request."""
        return EngineOutput(
            request_id,
            self.new_token_ids,
            self.finish_reason,
            self.stop_reason,
            self.error,
            self.logprobs,
            self.prompt_logprobs,
            self.num_cached_tokens,
            self.num_preemptions,
            self.queue_time_s,
            self.pooled,
            self.error_param,
        )


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
    model_revision: str = ""  # the checkpoint's: what block hashes begin with; empty where nothing is cached


class FeedFrame(msgspec.Struct, array_like=True):
    """One message of a feed to a Router: how busy the replica is, and what changed in its prefix cache."""

    load: LoadReport
    events: KVEventBatch | None = None  # the first frame brings a snapshot


class Frame(msgspec.Struct, array_like=True):
    """One message of a channel: all that one engine step brought its ingress."""

    sequence: int  # 0, 1, 2, ...: a gap means that tokens were lost
    outputs: list[OutputRecord]
    load: LoadReport | None = None  # with the first frame, and as a heartbeat
    fatal: str | None = None  # the engine is gone; why


class ControlMessage(msgspec.Struct, array_like=True):
    """Aborts, credits and the lease of one channel, in one call."""

    channel_id: str
    aborts: list[tuple[int, FinishReason]]  # stream id, and what the ingress says the request ended with
    credits: list[tuple[int, int]]  # stream id, tokens consumed so far
    close: bool = False  # end the channel
    draining: bool = False  # this ingress sees that Serve has taken the replica out of service


def encode(message: msgspec.Struct) -> bytes:
    """Msgpack bytes of any message here."""
    return msgspec.msgpack.encode(message)


def decode_frame(data: bytes) -> Frame:
    """The frame in `data`; msgspec.ValidationError when it is none."""
    return msgspec.msgpack.decode(data, type=Frame)


def decode_feed(data: bytes) -> FeedFrame:
    """The feed frame in `data`; msgspec.ValidationError when it is none."""
    return msgspec.msgpack.decode(data, type=FeedFrame)


def decode_control(data: bytes) -> ControlMessage:
    """The control message in `data`; msgspec.ValidationError when it is none."""
    return msgspec.msgpack.decode(data, type=ControlMessage)
