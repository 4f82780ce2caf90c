"""Engine side of the token channels: who gets which tokens, and who may have more (I9).

A channel leads to one ingress replica, over a connection or as one long-lived response. It carries one frame per engine
step with all of that ingress's outputs, the first token of a request never held back. Each request may have `window`
tokens that its client has not consumed; beyond it the engine pauses that request alone. A channel whose ingress was
silent for `lease_s` is closed and its requests are aborted. Lives on the event loop's thread; knows neither Ray nor
Serve.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from app.deployments.channel.frame_queue import FrameQueue
from app.deployments.channel.wire import ControlMessage, Frame, SecludedError, encode
from app.errors import EngineDeadError
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput, FinishReason

EARLY_ABORTS = 1024  # an abort may overtake the request that it ends

logger = logging.getLogger("manta.channel")


class StreamController(Protocol):
    """Takes what the hub asks of the engine. Callable from the event loop: none of these blocks."""

    def abort(self, request_ids: list[str]) -> None:
        """End these requests."""

    def pause(self, request_id: str) -> None:
        """Schedule nothing for this request until it is resumed."""

    def resume(self, request_id: str) -> None:
        """Go on with a paused request."""


@dataclass(slots=True)
class _Stream:
    """One running request of a channel, and its credit."""

    channel: TokenChannel
    stream_id: str
    request_id: str
    num_sent: int = 0
    num_consumed: int = 0
    paused: bool = False


class TokenChannel(FrameQueue):
    """One ingress replica's requests here, and the frames on their way to it."""

    def __init__(self, channel_id: str, ingress_id: str) -> None:
        super().__init__(ingress_id)
        self.channel_id = channel_id
        self.streams: dict[str, _Stream] = {}
        self.early_aborts: deque[str] = deque(maxlen=EARLY_ABORTS)  # for streams that are not known here
        self.draining = False  # its ingress sends no new requests
        self._sequence = 0

    def send(
        self,
        outputs: list[EngineOutput],
        load: LoadReport | None = None,
        fatal: str | None = None,
        secluded: bool | None = None,
    ) -> None:
        """Queue one frame."""
        self.push(encode(Frame(self._sequence, outputs, load, fatal, secluded)))
        self._sequence += 1


def _ignore_abort(request_id: str, reason: FinishReason) -> None:
    """The default of a hub without a counter of aborts."""


class ChannelHub:
    """All channels of one engine replica."""

    def __init__(
        self,
        engine: StreamController,
        window: int,
        lease_s: float,
        on_abort: Callable[[str, FinishReason], None] = _ignore_abort,
    ) -> None:
        self._engine = engine
        self._window = window
        self._lease_s = lease_s
        self._on_abort = on_abort
        self._channels: dict[str, TokenChannel] = {}
        self._streams: dict[str, _Stream] = {}  # by request id
        self._retired = False
        self._alone: tuple[str, str] | None = None  # channel and stream that has the replica for itself

    @property
    def channels(self) -> Iterable[TokenChannel]:
        """The open channels."""
        return self._channels.values()

    @property
    def retired(self) -> bool:
        """True if Serve has taken the replica out of service: every ingress says so, or the last one left so.

        One ingress that knows less, or late, decides nothing; one that opens a channel brings the replica back.
        """
        return self._retired

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_unpaused(self) -> int:
        """Those of them that wait for the engine, not for their client."""
        return sum(not stream.paused for stream in self._streams.values())

    def open(self, channel_id: str, ingress_id: str) -> TokenChannel:
        """A new channel; it replaces any other of the same ingress, whose requests are aborted."""
        for old in [c for c in self._channels.values() if c.listener_id == ingress_id]:
            self.drop(old)
        channel = TokenChannel(channel_id, ingress_id)
        self._channels[channel_id] = channel
        if self._alone is not None:
            channel.send([], secluded=True)
        self._settle()
        return channel

    def drop(self, channel: TokenChannel) -> None:
        """Forget a channel and abort what still runs on it; idempotent."""
        if self._channels.get(channel.channel_id) is channel:
            del self._channels[channel.channel_id]
            self._settle()
            if self._alone is not None and self._alone[0] == channel.channel_id:
                self._set_alone(None)
        self._abort([(stream, "abort") for stream in channel.streams.values()])
        channel.close()

    def seclude(self, channel_id: str, stream_id: str) -> bool:
        """Keep the replica for one stream, which is still to come: all others go on elsewhere, whosever they are.

        It ends when its ingress says `shared`, or is gone. False where another one has the replica for itself.
        """
        channel = self._channels.get(channel_id)
        if self._alone is not None or self._retired or channel is None or stream_id in channel.early_aborts:
            return False
        self._set_alone((channel_id, stream_id))
        self._abort([(stream, "abort") for stream in list(self._streams.values())])
        return True

    def has(self, request_id: str) -> bool:
        """True if a request has not ended."""
        return request_id in self._streams

    def add(self, channel_id: str, stream_id: str, request_id: str) -> None:
        """Tie a request to its channel; EngineDeadError when that is not open here, or the request was aborted, and
        SecludedError when another one has the replica for itself."""
        channel = self._channels.get(channel_id)
        if channel is None:
            raise EngineDeadError(f"channel {channel_id} is not open on this replica")
        if self._alone not in (None, (channel_id, stream_id)):
            raise SecludedError("another request has this replica for itself")
        if stream_id in channel.early_aborts:
            raise EngineDeadError("the request was aborted before it arrived")
        stream = _Stream(channel, stream_id, request_id)
        channel.streams[stream_id] = stream
        self._streams[request_id] = stream

    def remove(self, request_id: str) -> None:
        """Forget a request that the engine refused or that has ended."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.channel.streams.pop(stream.stream_id, None)

    def dispatch(self, outputs: list[EngineOutput]) -> None:
        """Send one step's outputs, which are the hub's from here on: one frame for each channel that has any.

        A request whose output cannot be sent ends with an error; the others of the step get theirs.
        """
        frames: dict[str, tuple[TokenChannel, list[EngineOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted; the engine ran a step past it
            channel = stream.channel
            _, frame = frames.setdefault(channel.channel_id, (channel, []))
            frame.append(self._account(stream, output))
        for channel, frame in frames.values():
            self._send(channel, frame)

    def control(self, message: ControlMessage) -> None:
        """Renew the channel's lease, abort and credit its requests, close it when asked."""
        channel = self._channels.get(message.channel_id)
        if channel is None:
            return  # closed meanwhile: all its requests are aborted already
        channel.renew()
        channel.draining = message.draining
        self._settle()
        streams = channel.streams
        channel.early_aborts.extend(i for i, _ in message.aborts if i not in streams)
        self._abort([(streams[i], reason) for i, reason in message.aborts if i in streams])
        for stream_id, num_consumed in message.credits:
            stream = streams.get(stream_id)
            if stream is not None:
                self._credit(stream, num_consumed)
        for stream_id in message.shared:
            if self._alone == (channel.channel_id, stream_id):
                self._set_alone(None)
            elif stream_id not in streams:
                channel.early_aborts.append(stream_id)  # it has overtaken the call that would seclude it
        if message.close:
            self.drop(channel)

    def expire(self) -> list[str]:
        """Drop the channels whose lease ran out; returns the ids of their ingresses."""
        late = [channel for channel in self._channels.values() if channel.is_silent(self._lease_s)]
        for channel in late:
            self.drop(channel)
        return [channel.listener_id for channel in late]

    def fail(self, reason: str) -> None:
        """The engine is gone: say so on every channel and close it."""
        for channel in list(self._channels.values()):
            channel.send([], fatal=reason)
            channel.close()
        self._channels.clear()
        self._streams.clear()
        self._alone = None

    def give_up(self) -> None:
        """This replica ends though its engine is well: let every request go on elsewhere, and close the channels."""
        for channel in list(self._channels.values()):
            streams = list(channel.streams.values())
            channel.send([EngineOutput(stream.stream_id, [], "abort") for stream in streams])
            self._abort([(stream, "abort") for stream in streams])
            channel.close()
        self._channels.clear()
        self._alone = None

    def heartbeat(self, load: LoadReport) -> None:
        """Tell every ingress how busy this replica is."""
        for channel in self._channels.values():
            channel.send([], load=load)

    def _set_alone(self, stream: tuple[str, str] | None) -> None:
        self._alone = stream
        for channel in self._channels.values():
            channel.send([], secluded=stream is not None)

    def _settle(self) -> None:
        if self._channels:
            self._retired = all(channel.draining for channel in self._channels.values())

    def _abort(self, streams: list[tuple[_Stream, FinishReason]]) -> None:
        if not streams:
            return
        for stream, reason in streams:
            self.remove(stream.request_id)
            self._on_abort(stream.request_id, reason)
        self._engine.abort([stream.request_id for stream, _ in streams])

    def _account(self, stream: _Stream, output: EngineOutput) -> EngineOutput:
        """The output as it goes down the channel; its request has ended with it or has used up some of its credit."""
        try:
            if output.finish_reason is not None:
                self.remove(output.request_id)
            else:
                self._charge(stream, len(output.new_token_ids))
        except Exception as error:
            return self._end_unsent(stream.channel, stream.stream_id, error)
        output.request_id = stream.stream_id
        return output

    def _send(self, channel: TokenChannel, outputs: list[EngineOutput]) -> None:
        try:
            channel.send(outputs)
        except Exception:  # one of them holds what has no encoding; a frame is queued whole or not at all
            channel.send([self._encodable(channel, output) for output in outputs])

    def _encodable(self, channel: TokenChannel, output: EngineOutput) -> EngineOutput:
        try:
            encode(output)
        except Exception as error:
            return self._end_unsent(channel, output.request_id, error)
        return output

    def _end_unsent(self, channel: TokenChannel, stream_id: str, error: Exception) -> EngineOutput:
        """The error in the place of an output, whose request runs no longer."""
        logger.error("an output could not be sent; its request ends", exc_info=error)
        stream = channel.streams.get(stream_id)
        if stream is not None:
            self._abort([(stream, "error")])
        return EngineOutput(stream_id, [], "error", error=f"its output could not be sent: {error}")

    def _charge(self, stream: _Stream, num_tokens: int) -> None:
        stream.num_sent += num_tokens
        if not stream.paused and stream.num_sent - stream.num_consumed >= self._window:
            stream.paused = True
            self._engine.pause(stream.request_id)

    def _credit(self, stream: _Stream, num_consumed: int) -> None:
        stream.num_consumed = max(stream.num_consumed, num_consumed)
        # Half a window of slack, so that a client at the engine's own pace does not flip it at every token.
        if stream.paused and stream.num_sent - stream.num_consumed <= self._window // 2:
            stream.paused = False
            self._engine.resume(stream.request_id)
