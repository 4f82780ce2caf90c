"""Remembers what an ingress needs of a request so that it can go on elsewhere, and the requests that replicas
died of."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from app.deployments.channel.channel_client import ChannelClient
from app.errors import PoisonedRequestError
from app.records.media import block_extras
from app.records.outputs import EngineOutput
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.telemetry.request_record import GenerationRecord, Leg

MAX_DEATHS = 2  # of replicas under a request; then it runs once more, alone
OUTLIVED_TOKENS = 32  # so much further than when a replica died, alone: others may join it, and the next has its turn
ALONE_S = 60.0  # longest time alone: a client that does not read must not keep a replica from all others
QUARANTINE_S = 600.0
WHOLE_PROMPT = 1 << 30  # a block that holds any
MAX_QUARANTINED = 256


class Continuation:
    """One request on its way over one replica or several."""

    def __init__(self, request: EngineRequest, record: GenerationRecord | None = None) -> None:
        self.num_deaths = 0
        self.left: dict[str, str] = {}  # channels that were lost or refused it, with their replicas
        self.lost_at: float | None = None  # monotonic; while nothing has come since it left a replica
        self.refused_at: float | None = None  # monotonic; the first of the refusals since its last output
        self.leg = Leg(time.monotonic(), 0.0, "")  # the replica that has it, or is being looked for
        self.is_silent = True  # nothing has come from that one
        self.record = record or GenerationRecord("", request.request_id, request.num_client_tokens)
        self.revision: str | None = None  # of the weights that gave its first tokens: others must not go on with it
        self._request = request
        self._output: list[int] = []
        self._had_come = 0  # tokens, at the last death

    @property
    def has_outlived(self) -> bool:
        """True if a suspect has come well past the place where replicas died. Believed once only: what kills late would
        be let out again and again."""
        return self.num_deaths == MAX_DEATHS and len(self._output) >= self._had_come + OUTLIVED_TOKENS

    @property
    def has_moved(self) -> bool:
        """True if a replica that had taken it is gone, so that a client waits for it to go on."""
        return self.num_deaths > 0 or self.lost_at is not None or bool(self._output)

    @property
    def is_suspect(self) -> bool:
        """True if it may be the cause of the deaths."""
        return self.num_deaths >= MAX_DEATHS

    @property
    def request(self) -> EngineRequest:
        """Returns what to ask the next replica for: the rest of it."""
        return replace(self._request, output_token_ids=list(self._output)) if self._output else self._request

    def begin_leg(self) -> None:
        """Begin to look for a replica."""
        self.leg = Leg(time.monotonic(), 0.0, "", num_before=len(self._output))

    def note_sent(self, replica_id: str, at: float) -> None:
        """Note that the replica that was chosen for it at `at` has taken it."""
        self.leg.replica_id, self.leg.sent_at, self.is_silent = replica_id, at, True
        self.record.legs.append(self.leg)

    def note_first_output(self, output: EngineOutput) -> None:
        """Note that the first output of that replica has come."""
        self.is_silent = False
        self.leg.first_at = time.monotonic()
        self.leg.queue_s = output.queue_time_s
        self.leg.num_cached_tokens = output.num_cached_tokens

    def end_leg(self, last: EngineOutput | None, reason: str) -> None:
        """Note that it has ended at that replica, with that output if any, or has left it; `reason` counts without
        one."""
        self.record.num_output_tokens = len(self._output)
        if last is not None and last.finish_reason is not None:
            reason = last.finish_reason
        self.record.finish_reason = reason
        if self.leg.ended_at is None:
            self.leg.ended_at = time.monotonic()
            self.leg.times = None if last is None else last.times

    def add_output(self, output: EngineOutput, revision: str = "") -> None:
        """Add an output that the client is given, of a replica with weights of `revision`."""
        self.refused_at = None
        if self.revision is None and output.new_token_ids:
            self.revision = revision
        self._output += output.new_token_ids

    def note_loss(self, *, died: bool) -> None:
        """Note that the replica that had taken it is gone, or has `died`."""
        self.num_deaths += died
        if died:
            self._had_come = len(self._output)
        self.lost_at = time.monotonic()


def _tell_nobody(digest: bytes) -> None:
    """The default of a quarantine that is nobody else's."""


class Quarantine:
    """Requests that are refused for QUARANTINE_S: a tenant's same prompt and parameters, whatever the seed.

    `tell` is told the digest of each that is added here, for the other ingresses.
    """

    def __init__(
        self, tell: Callable[[bytes], None] = _tell_nobody, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._until: dict[bytes, float] = {}  # by digest, oldest first

    def add(self, request: EngineRequest) -> PoisonedRequestError:
        """Refuse it from now on; returns the error to raise."""
        digest = _digest(request)
        self.refuse({digest: QUARANTINE_S})
        self._tell(digest)
        return PoisonedRequestError(
            f"{MAX_DEATHS + 1} engine replicas died while this request ran on them, at the last one alone; it is the "
            f"cause, and is refused for {QUARANTINE_S:g} s"
        )

    def refuse(self, seconds: Mapping[bytes, float]) -> None:
        """Refuse the requests with these digests for so long."""
        for digest, left_s in seconds.items():
            while len(self._until) >= MAX_QUARANTINED:
                del self._until[next(iter(self._until))]
            self._until[digest] = self._clock() + left_s

    def refused(self) -> dict[bytes, float]:
        """Returns how long each is still refused, in seconds."""
        now = self._clock()
        return {digest: until - now for digest, until in self._until.items() if until > now}

    def check(self, request: EngineRequest) -> None:
        """PoisonedRequestError for one that is refused."""
        if not self._until:
            return
        left_s = self._until.get(digest := _digest(request), 0.0) - self._clock()
        if left_s > 0:
            raise PoisonedRequestError(
                f"engine replicas died each time this request ran on them; it is refused for another {left_s:.0f} s"
            )
        self._until.pop(digest, None)


def _digest(request: EngineRequest) -> bytes:
    work = request.work
    params = work if isinstance(work, PoolingParams) else work.model_copy(update={"seed": None})
    prompt = np.array(request.prompt_token_ids, np.int64).tobytes()
    media = block_extras(request.asks, WHOLE_PROMPT)  # two pictures may have the same tokens
    beside = repr((params, request.cache_root, media))  # whose it is, and of which adapter
    return hashlib.blake2b(prompt + beside.encode(), digest_size=16).digest()


class Seclusion:
    """The turn of a suspect to have a replica for itself: one of this ingress at a time. The replica itself keeps all
    others out, those of other ingresses too (`ChannelHub.seclude`)."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._suspect: Continuation | None = None
        self._channel: ChannelClient | None = None
        self._stream_id: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, suspect: Continuation) -> None:
        """Wait for its turn."""
        await self._lock.acquire()
        self._suspect = suspect

    async def take(self, channel: ChannelClient) -> bool:
        """True if the suspect has that replica for itself from now on."""
        self._stream_id = await channel.seclude()
        if self._stream_id is None:
            return False
        self._channel, suspect = channel, self._suspect
        assert suspect is not None
        self._timer = asyncio.get_running_loop().call_later(ALONE_S, lambda: self.leave(suspect))
        return True

    def holds(self, continuation: Continuation) -> bool:
        """True if it is this one's turn."""
        return self._suspect is continuation

    def stream_id(self, continuation: Continuation) -> str | None:
        """The stream under which it has its replica for itself."""
        return self._stream_id if self.holds(continuation) else None

    def leave(self, continuation: Continuation) -> None:
        """Others may go there again; nothing happens for one whose turn it is not."""
        if not self.holds(continuation):
            return
        if self._channel is not None and self._stream_id is not None:
            self._channel.share(self._stream_id)
        if self._timer is not None:
            self._timer.cancel()
        self._suspect = self._channel = self._stream_id = self._timer = None
        self._lock.release()
