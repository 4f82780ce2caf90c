"""Ingress side of the token channels: one ChannelClient per engine replica (I9).

It dispatches frames to the requests they belong to, notices a gap in the sequence numbers, tells all its requests at
once when the replica is gone, and sends aborts, credits and the lease in one batched call.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Literal, Protocol

from app.deployments.channel.submitter import SubmitPort, Submitter
from app.deployments.channel.wire import ControlMessage, Frame, SecludedError, decode_frame, encode
from app.deployments.routing.policies.base import RouteQuery
from app.errors import EngineDeadError
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput, FinishReason
from app.records.request import EngineRequest

FLUSH_INTERVAL_S = 0.03  # aborts and credits wait so long for company
# A replica sends a heartbeat every second. Turns of this process's own clock are counted, not seconds by the wall's, so
# that a pause of this process is not taken for a silence of the replica.
TURN_S = 1.0
MAX_SILENT_TURNS = 3  # then it is not chosen
LOST_SILENT_TURNS = 4  # then the channel is given up: the replica hangs, or is out of reach

logger = logging.getLogger("manta.channel")

State = Literal["opening", "live", "draining", "closed"]


class ReplicaPort(SubmitPort, Protocol):
    """Reaches one engine replica: over a connection or a Serve handle in the ingress, in memory in tests."""

    def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """The replica's frames."""

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        """Have the replica for that stream alone, once nothing else is computed there; False where another has it."""

    async def control(self, message: bytes) -> None:
        """Send a ControlMessage. Raises when that took too long."""


class RequestMovedError(EngineDeadError):
    """The request has to go on at another replica, though this one has not died."""


class RequestStream:
    """The outputs of one request on their way to its client. Close it in any case: that aborts what still runs."""

    def __init__(self, channel: ChannelClient, stream_id: str, request: EngineRequest) -> None:
        self.stream_id = stream_id
        self.request_id = request.request_id
        self.num_tokens = RouteQuery.of(request).num_tokens
        self.num_consumed = 0
        self._num_credited = 0
        self._channel = channel
        self._outputs: deque[EngineOutput] = deque()
        self._error: EngineDeadError | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: EngineOutput) -> None:
        """Queue one output for the client."""
        output.request_id = self.request_id
        self._outputs.append(output)
        self._wake()

    def fail(self, error: EngineDeadError) -> None:
        """The replica is gone: the client learns it after the outputs that did arrive."""
        self._error = error
        self._wake()

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """The outputs up to the one that carries a finish reason; EngineDeadError when the replica dies before."""
        while not self._finished:
            if not self._outputs:
                if self._error is not None:
                    raise self._error
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                continue
            output = self._outputs.popleft()
            self._finished = output.finish_reason is not None
            yield output
            self._consume(len(output.new_token_ids))  # only once the client came back for more

    def close(self, reason: FinishReason = "abort") -> None:
        """Forget the request; the engine aborts it if it still runs."""
        self._channel.forget(self, None if self._finished else reason)

    def _consume(self, num_tokens: int) -> None:
        self.num_consumed += num_tokens
        if not self._finished and self.num_consumed - self._num_credited >= self._channel.credit_step:
            self._num_credited = self.num_consumed
            self._channel.credit(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _ignore_load(report: LoadReport) -> None:
    """The default of a channel whose load nobody follows."""


class ChannelClient:
    """One channel from one engine replica, from its opening to its end; reconnecting means a new ChannelClient."""

    def __init__(
        self,
        port: ReplicaPort,
        replica_id: str,
        ingress_id: str,
        *,
        window: int,
        lease_s: float,
        kept_bytes: int = 0,
        on_load: Callable[[LoadReport], None] = _ignore_load,
        on_closed: Callable[[ChannelClient, int], None] | None = None,
    ) -> None:
        """`kept_bytes`: see Submitter."""
        self.replica_id = replica_id
        self.channel_id = f"{ingress_id}.{uuid.uuid4().hex[:8]}"
        self.state: State = "opening"
        self.load: LoadReport | None = None
        self.is_secluded = False  # one request has the replica for itself, maybe another ingress'
        self.credit_step = max(1, window // 2)
        self._ingress_id = ingress_id
        self._port = port
        self._lease_s = lease_s
        self._on_load = on_load
        self._on_closed = on_closed  # told how many requests were lost
        self._streams: dict[str, RequestStream] = {}
        self._next_stream_id = 0
        self._next_sequence = 0
        self._silent_turns = 0
        self._aborts: dict[str, FinishReason] = {}
        self._credits: dict[str, int] = {}
        self._alone_id: str | None = None  # stream of this ingress that has the replica for itself
        self._shared: tuple[str, ...] = ()
        self._draining_since = 0.0
        self._dirty = asyncio.Event()
        self._opened = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._submitter = Submitter(port, self.channel_id, kept_bytes)

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt and output tokens of this ingress's own requests here."""
        return sum(stream.num_tokens for stream in self._streams.values())

    @property
    def is_live(self) -> bool:
        """True if new requests may be sent here: open, heard of lately, able to make progress."""
        heard = self._silent_turns <= MAX_SILENT_TURNS
        return self.state == "live" and heard and self.load is not None and self.load.accepting

    @property
    def held(self) -> str:
        """Why new requests would wait at the replica; empty where they do not."""
        return "" if self.load is None else self.load.held

    @property
    def _is_closed(self) -> bool:
        return self.state == "closed"

    def has_drained_for(self, seconds: float) -> bool:
        """True if it has taken no new requests for so long."""
        return self.state == "draining" and time.monotonic() - self._draining_since > seconds

    def start(self) -> None:
        """Open the channel in the background."""
        self._tasks = [asyncio.create_task(part) for part in (self._read(), self._send_control(), self._listen())]

    async def wait_open(self, timeout_s: float) -> bool:
        """True if the first frame came in time, and the channel is still open."""
        try:
            await asyncio.wait_for(self._opened.wait(), timeout_s)
        except TimeoutError:
            return False
        return not self._is_closed

    async def ends_within(self, seconds: float) -> bool:
        """True if the replica turns out to be gone in so many seconds: a call that breaks off may say so first."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def seclude(self) -> str | None:
        """The id of a stream that has the replica for itself until `share`; None where it could not be had."""
        self._alone_id = stream_id = self._draw_stream_id()
        granted = False
        try:
            granted = await self._port.seclude(self.channel_id, stream_id)
        except Exception as error:
            logger.debug("engine replica %s was not secluded: %s", self.replica_id, error)
        finally:
            if not granted:
                self.share(stream_id)
        return stream_id if granted else None

    def share(self, stream_id: str) -> None:
        """Let others join a stream that had the replica for itself."""
        self._alone_id = None
        self._shared += (stream_id,)
        self._dirty.set()

    def _draw_stream_id(self) -> str:
        self._next_stream_id += 1
        return str(self._next_stream_id - 1)

    async def submit(self, request: EngineRequest, stream_id: str | None = None) -> RequestStream:
        """Send a request; its outputs come with the stream. Raises the engine's refusal, or EngineDeadError.

        `stream_id`: of `seclude`.
        """
        if self.state != "live":
            raise EngineDeadError(f"engine replica {self.replica_id} takes no new requests")
        stream = RequestStream(self, stream_id or self._draw_stream_id(), request)
        self._streams[stream.stream_id] = stream  # before the call: the first token may overtake its answer
        try:
            refusal = await self._submitter.submit(stream.stream_id, request)
        except asyncio.CancelledError:
            stream.close()
            raise
        except Exception as error:
            stream.close()
            raise EngineDeadError(f"engine replica {self.replica_id} cannot be reached: {error}") from error
        if refusal is not None:
            self.forget(stream, None)
            if isinstance(refusal, SecludedError):
                raise RequestMovedError(f"engine replica {self.replica_id} is left: {refusal.message}")
            raise refusal
        return stream

    def forget(self, stream: RequestStream, abort: FinishReason | None) -> None:
        """Drop a request; `abort` says with which reason the engine shall end it, None that it has ended."""
        if self._streams.pop(stream.stream_id, None) is None:
            return
        self._credits.pop(stream.stream_id, None)
        if abort is not None and self.state != "closed":
            self._aborts[stream.stream_id] = abort
            self._dirty.set()
        if self.state == "draining" and not self._streams:
            self._dirty.set()

    def credit(self, stream: RequestStream) -> None:
        """Tell the engine, soon, how much of a request its client has taken."""
        self._credits[stream.stream_id] = stream.num_consumed
        self._dirty.set()

    def drain(self) -> None:
        """Serve has taken the replica out of service: finish what runs, then close the channel so that it can stop."""
        if self.state in ("opening", "live"):
            self.state = "draining"
            self._draining_since = time.monotonic()
            self._dirty.set()

    def move_requests(self, reason: str) -> None:
        """End what runs here, so that it goes on elsewhere."""
        self._move([*self._streams.values()], reason)

    def _move(self, streams: list[RequestStream], reason: str) -> None:
        for stream in streams:
            self.forget(stream, "abort")
            stream.fail(RequestMovedError(f"engine replica {self.replica_id} is left: {reason}"))

    def revive(self) -> None:
        """The replica is in service after all."""
        if self.state == "draining":
            self.state = "live" if self._opened.is_set() else "opening"
            self._dirty.set()

    def close(self, reason: str = "the ingress closed the channel") -> None:
        """End the channel now; its requests get EngineDeadError. Idempotent."""
        if self.state == "closed":
            return
        self.state = "closed"
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(EngineDeadError(f"engine replica {self.replica_id} is gone: {reason}"))
        if streams:
            logger.warning("channel to %s lost with %d requests: %s", self.replica_id, len(streams), reason)
        self._opened.set()
        self._ended.set()
        self._submitter.close(reason)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._on_closed is not None:
            self._on_closed(self, len(streams))

    async def _read(self) -> None:
        reason = "it ended the channel"
        try:
            async with aclosing(self._port.open_channel(self.channel_id, self._ingress_id)) as frames:
                async for data in frames:
                    self._receive(decode_frame(data))
        except asyncio.CancelledError:
            raise
        except EngineDeadError as error:
            reason = error.message
        except Exception as error:  # whatever the transport raises: the replica is out of reach
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        self.close(reason)

    def _receive(self, frame: Frame) -> None:
        if frame.sequence != self._next_sequence:
            raise EngineDeadError(f"frame {self._next_sequence} was lost (got {frame.sequence})")
        self._next_sequence += 1
        self._silent_turns = 0
        for output in frame.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
        if frame.fatal is not None:
            raise EngineDeadError(frame.fatal)
        if frame.secluded is not None:
            self.is_secluded = frame.secluded
        if frame.secluded:
            others = [stream for stream in self._streams.values() if stream.stream_id != self._alone_id]
            self._move(others, "another request has it for itself")
        if frame.load is not None:
            self.load = frame.load
            self._on_load(frame.load)
        if self.state == "opening":
            self.state = "live"
        self._opened.set()

    async def _listen(self) -> None:
        """Give the channel up when the replica gives no sign of life; what it may send later is not read any more."""
        await self._opened.wait()  # until then, who opened it has a limit of its own
        while self.state != "closed":
            await asyncio.sleep(TURN_S)
            self._silent_turns += 1
            if self._silent_turns > LOST_SILENT_TURNS:
                self.close(f"no sign of life for {LOST_SILENT_TURNS * TURN_S:g} s")

    async def _send_control(self) -> None:
        """Renew the lease in time, and carry aborts and credits soon after they arise."""
        while self.state != "closed":
            try:
                await asyncio.wait_for(self._dirty.wait(), self._lease_s / 3)
                await asyncio.sleep(FLUSH_INTERVAL_S)
            except TimeoutError:
                pass  # nothing to say: the message renews the lease
            self._dirty.clear()
            await self._flush()

    async def _flush(self) -> None:
        aborts, self._aborts = self._aborts, {}
        credits, self._credits = self._credits, {}
        shared, self._shared = self._shared, ()
        draining = self.state == "draining"
        done = draining and not self._streams
        message = ControlMessage(self.channel_id, [*aborts.items()], [*credits.items()], done, draining, shared)
        try:
            await self._port.control(encode(message))
        except Exception as error:
            if self.state == "closed":
                return
            # The channel itself tells when the replica is gone; until then nothing may be forgotten.
            logger.debug("control call to %s failed: %s", self.replica_id, error)
            self._aborts = aborts | self._aborts
            self._credits = credits | self._credits
            self._shared = shared + self._shared
            await asyncio.sleep(FLUSH_INTERVAL_S)
            if aborts or credits or shared or done:
                self._dirty.set()
