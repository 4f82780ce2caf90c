"""Takes the requests of one model to its replicas, and on to another where one is lost: the client's stream goes on.

The ingress owns the request and holds what it has generated so far, so that another replica can take it up behind that,
as an engine resumes a request that it had preempted: with the same tokens (I6). Any number of planned moves is fine. A
request under which MAX_DEATHS replicas died may be the cause: it runs once more where it can take no other with it,
while another replica serves these; dying there too, it is refused for a while. One that comes past the place where they
died shares its replica again: where a whole replica's requests are suspects, each takes a moment to be cleared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import cast

from app.api.engine_client import RouteInfo
from app.api.generation.events import ENDED_BY
from app.deployments.channel.channel_client import ChannelClient, RequestMovedError, RequestStream
from app.deployments.channel.own_context import start_outside
from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.ingress.circuit_breaker import CircuitBreaker
from app.deployments.ingress.claims import claim_of, rejection_error
from app.deployments.ingress.continuation import MAX_DEATHS, Continuation, Quarantine, Seclusion
from app.deployments.ingress.router_client import RouterClient
from app.deployments.ingress.waiting_room import WaitingRoom, no_replica_error
from app.deployments.router.admission import Admission, Answer
from app.deployments.routing.claim import Claim, Rejection, Wait
from app.deployments.routing.policies.base import Decision, RouteQuery
from app.errors import EngineDeadError, OverloadedError, PoisonedRequestError
from app.records.adapter import AdapterAsk
from app.records.outputs import EngineOutput, FinishReason
from app.records.request import EngineRequest
from app.telemetry.metrics_recorder import MetricsRecorder
from app.telemetry.request_record import Leg

MOVE_WAIT_S = 120.0  # a request that has lost its replica waits so long for another one
PLANNED_WAIT_S = 600.0  # one whose replica was taken out of service: the next one may have a large model to load
POLL_S = 0.05
END_WAIT_S = 0.5  # a channel may end so long after a call that broke off, where both tell of one death
TELL_AFTER_S = 0.02  # the request goes first, and what is told of many goes together
RETRY_S = 0.25  # a full replica is asked again, by a request that has run already


class Dispatcher:
    """One model's. Lives on one event loop."""

    def __init__(
        self,
        pool: ReplicaPool,
        router: RouterClient,
        recorder: MetricsRecorder,
        *,
        num_replicas: int = 1,
        waiting_room: WaitingRoom | None = None,
        quarantine: Quarantine | None = None,
        breaker_faults: int = 3,
        admission: Admission | None = None,
    ) -> None:
        """`admission`: over the pool's book, for the time when the Router does not answer."""
        self._pool = pool
        self._router = router
        self._recorder = recorder
        self._num_replicas = num_replicas  # that are meant to run
        self._waiting_room = waiting_room or WaitingRoom(pool.model)
        self._quarantine = quarantine or Quarantine()
        self._seclusion = Seclusion()
        self._breaker = CircuitBreaker(breaker_faults)
        self._admission = admission

    async def outputs(self, request: EngineRequest, route: RouteInfo) -> AsyncGenerator[EngineOutput, None]:
        """The request's outputs, whichever replicas bring them.

        Raises EngineDeadError when no replica can take it, OverloadedError when none can in time, DeadlineError,
        PoisonedRequestError, and what the engine refuses it with.
        """
        self._quarantine.check(request)
        way = Continuation(request, route.record)
        while True:
            way.begin_leg()
            channel = await self._choose(way, route)
            chosen_at = time.monotonic()
            stream: RequestStream | None = None
            output: EngineOutput | None = None
            self._breaker.note_sent(channel.replica_id)
            try:
                stream = await channel.submit(way.request, self._seclusion.stream_id(way))
                route.replica_id = channel.replica_id
                way.note_sent(channel.replica_id, chosen_at)
                async for output in stream.outputs():
                    if output.finish_reason == "abort":  # nobody here has asked for that
                        way.left[channel.channel_id] = channel.replica_id
                        raise RequestMovedError(f"engine replica {channel.replica_id} gave the request up")
                    if way.is_silent:
                        self._goes_on(way, output)
                    way.add_output(output, _revision(channel))
                    if self._seclusion.holds(way) and (way.has_outlived or not self._others(channel)):
                        self._seclusion.leave(way)
                    yield output
                self._breaker.success(channel.replica_id)
                return
            except EngineDeadError as error:
                asked = stream is not None or await _broke_off(channel, error)
                self._note_loss(way, channel, error, asked=asked)
            except OverloadedError:
                way.refused_at = way.refused_at or time.monotonic()
                if not way.has_moved or time.monotonic() - way.refused_at > MOVE_WAIT_S:
                    raise
                if route.place.replica_id == channel.replica_id:
                    route.place.replica_id = None  # another one may have room by then
                await asyncio.sleep(RETRY_S)
            finally:
                if stream is not None:
                    ended_by = cast(FinishReason, route.extra.get(ENDED_BY, "abort"))
                    stream.close(ended_by)
                    way.end_leg(output, ended_by)
                self._seclusion.leave(way)

    def _note_loss(self, way: Continuation, channel: ChannelClient, error: EngineDeadError, *, asked: bool) -> None:
        """The replica refused the request, or is lost under it; raises where that was once too often. `asked`: it may
        have had the request."""
        died = not isinstance(error, RequestMovedError)
        if died and (asked or channel.state == "closed"):
            self._breaker.fault(channel.replica_id, channel.channel_id)
        elif died and error.__cause__ is not None:  # else it has answered
            self._breaker.fault(channel.replica_id)
        if died:
            way.left[channel.channel_id] = channel.replica_id
        if not asked and channel.state != "closed":
            return  # a refusal
        self._recorder.increment("manta:ingress_migrations_total", 1.0, "lost" if died else "moved")
        way.note_loss(died=died)
        if asked:
            way.leg.left_because = "lost" if died else "moved"
        if not died or not self._seclusion.holds(way):
            return
        if asked:
            raise self._quarantine.add(way.request) from error
        if way.num_deaths > MAX_DEATHS + 1:  # before it was sent: none of them has had it
            raise PoisonedRequestError(f"{way.num_deaths} engine replicas died before this request could be sent there")

    def _goes_on(self, way: Continuation, output: EngineOutput) -> None:
        """The first output of a replica, maybe since the loss of another one."""
        way.note_first_output(output)
        if way.lost_at is None:
            return
        self._recorder.observe("manta:ingress_migration_stall_seconds", time.monotonic() - way.lost_at)
        way.lost_at = None

    # ---- where to

    async def _choose(self, way: Continuation, route: RouteInfo) -> ChannelClient:
        """The replica of the prompt's place; the first choice finds one, and so does who finds that one lost."""
        if way.is_suspect:
            return await self._choose_alone(way)
        place = route.place
        async with place.lock:
            live = await self._some_live(way)
            if place.replica_id not in live:
                place.replica_id = await self._place(way, live)
                live = await self._some_live(way)  # it took a while
            if place.replica_id not in live:
                place.replica_id = self._pool.choose(RouteQuery.of_prompt(way.request), live)
            return live[place.replica_id]

    async def _place(self, way: Continuation, live: dict[str, ChannelClient]) -> str:
        """Places it where the Router says, or else on the less loaded of two; waits while the Router says so. Where
        the Router could only name the one replica there is, it is told, and nobody waits for it."""
        claim = claim_of(way)
        if claim is None or not self._has_no_choice(claim, live):
            return await self._placed_by_router(way, live, claim)
        (replica_id,) = live
        way.leg.level = "ingress"
        start_outside(self._tell(way.leg, way.request, claim._replace(may_wait=True)))
        self._pool.count_request(replica_id, RouteQuery.of_prompt(way.request))
        self._count_admission(way, "admitted")
        return replica_id

    async def _placed_by_router(self, way: Continuation, live: dict[str, ChannelClient], claim: Claim | None) -> str:
        gone = {*way.left.values(), *self._pool.live()}
        excluded = tuple(name for name in gone if name not in live)
        query, decision = RouteQuery.of_prompt(way.request), "admitted"
        while isinstance(answer := await self._ask(way.request, excluded, claim), Wait):
            decision = "waited"
            with self._waiting_room.counted(way.request):
                await asyncio.sleep(answer.wait_s)
            claim = claim_of(way)
        if answer is None and claim is not None and self._admission is not None:
            answer = self._admission.refusal(query, claim, live)
        if isinstance(answer, Rejection):
            self._count_admission(way, f"rejected_{answer.reason}")
            raise rejection_error(answer)
        if answer is not None and answer.replica_id in live:
            replica_id = answer.replica_id
            self._pool.count_request(replica_id, query)
        else:
            answer, replica_id, decision = None, self._pool.choose(query, live), "local"
        self._note_level(way.leg, answer)
        if claim is not None:
            self._count_admission(way, decision)
        return replica_id

    def _has_no_choice(self, claim: Claim, live: dict[str, ChannelClient]) -> bool:
        """True if the model's one replica has no queue, so that even admission has nothing to say. Other ingresses are
        taken to have sent there what this one has since the replica's last report."""
        if self._num_replicas != 1 or len(live) != 1 or claim.is_retry or claim.time_left_s is not None:
            return False
        loads = [one for one in self._pool.book.replicas() if one.report.replica_id in live]
        return any(not one.may_have_queue(self._pool.num_ingresses) for one in loads)

    async def _tell(self, leg: Leg, request: EngineRequest, claim: Claim) -> None:
        """The Router counts a request that is on its way, and says what the replica holds of its prompt. `claim` may
        wait: it is not refused any more."""
        await asyncio.sleep(TELL_AFTER_S)
        answer = await self._ask(request, (), claim)
        self._note_level(leg, answer if isinstance(answer, Decision) else None)

    def _note_level(self, leg: Leg, answer: Decision | None) -> None:
        """Note what the choice was informed by; None: not by the Router."""
        if answer is not None and (load := self._pool.load) is not None:
            leg.num_hit_tokens = sum(answer.match) * load.block_size
        if answer is None and self._router.is_silent:  # one that answers may know no replica yet, or another one
            self._recorder.increment("manta:ingress_route_fallbacks_total")
        leg.level = "ingress" if answer is None else answer.level
        self._recorder.increment("manta:ingress_routes_total", 1.0, leg.level)

    def _count_admission(self, way: Continuation, decision: str) -> None:
        name = way.request.placement.service_class.name
        self._recorder.increment("manta:admission_total", 1.0, name, decision)

    async def _ask(self, request: EngineRequest, excluded: tuple[str, ...], claim: Claim | None) -> Answer | None:
        return await self._router.place(self._pool.model, request, self._pool.load, excluded, claim)

    def _live(self, way: Continuation) -> dict[str, ChannelClient]:
        """The replicas that may take it: not those that it left, nor of other weights than have given it tokens, and
        not that of a suspect."""
        live = {name: one for name, one in self._shared().items() if one.channel_id not in way.left}
        if way.revision is not None:
            live = {name: one for name, one in live.items() if _revision(one) == way.revision}
        if not way.has_moved:  # what has run may stand still there, as it does where it came from
            live = {name: one for name, one in live.items() if not one.held}
        if (ask := way.request.asked(AdapterAsk)) is not None:  # where none has it, the engine says so
            live = {name: one for name, one in live.items() if _serves(one, ask)} or live
        return {name: live[name] for name in self._breaker.usable(live)}

    def _shared(self) -> dict[str, ChannelClient]:
        """The replicas that no request has for itself."""
        return {name: one for name, one in self._pool.live().items() if not one.is_secluded}

    def _others(self, channel: ChannelClient) -> bool:
        """True if another replica serves."""
        return bool(self._pool.live().keys() - {channel.replica_id})

    async def _some_live(self, way: Continuation) -> dict[str, ChannelClient]:
        """The replicas of `_live`, of which there is one at least; a request that was running waits for it, and so
        does one that may wake the model."""
        deadline = time.monotonic() + (MOVE_WAIT_S if way.num_deaths else PLANNED_WAIT_S)
        while not (live := self._live(way)):
            is_kept = len(self._shared()) < len(self._pool.live())  # one is, for a suspect: not for long
            if not way.has_moved and not is_kept:
                await self._wait_for_one(way)
                continue
            if time.monotonic() > deadline:
                raise no_replica_error(self._pool.model)
            await asyncio.sleep(POLL_S)
        return live

    async def _wait_for_one(self, way: Continuation) -> None:
        """Until a replica takes a request that is new; a model of which all are held has some, and wakes no more."""

        def is_open() -> bool:
            return bool(self._live(way))

        if self._pool.held:
            await self._waiting_room.wait_held(way.request, is_open, lambda: self._pool.held)
        else:
            await self._waiting_room.wait(way.request, is_open)

    async def _choose_alone(self, way: Continuation) -> ChannelClient:
        """A replica without others, which move on; PoisonedRequestError where no second one serves them."""
        try:
            async with asyncio.timeout(MOVE_WAIT_S):
                await self._seclusion.enter(way)
        except TimeoutError:
            raise EngineDeadError("other requests that replicas may have died of have their turn first") from None
        try:
            return await self._seclude(way)
        except BaseException:
            self._seclusion.leave(way)
            raise

    async def _seclude(self, way: Continuation) -> ChannelClient:
        """Each ingress asks for the same one first, so that those who ask at the same time take turns there, and do
        not take all replicas from the others."""
        deadline = time.monotonic() + MOVE_WAIT_S
        while True:
            live = self._live(way)
            if live and len(self._shared()) >= 2 and await self._seclusion.take(channel := live[min(live)]):
                return channel
            if self._num_replicas < 2 or time.monotonic() > deadline:
                raise PoisonedRequestError(
                    f"{MAX_DEATHS} engine replicas died while this request ran on them; it may be the cause, and is"
                    " not sent to another one, which all others need"
                )
            await asyncio.sleep(POLL_S)


async def _broke_off(channel: ChannelClient, error: EngineDeadError) -> bool:
    """True if the replica ended while it was asked to take a request: what a request dies of may be its admission."""
    return error.__cause__ is not None and await channel.ends_within(END_WAIT_S)


def _serves(channel: ChannelClient, ask: AdapterAsk) -> bool:
    """True if its replica has the adapter, as far as this ingress has heard."""
    digest = ask.digest.hex()
    return channel.load is not None and any(adapter.digest == digest for adapter in channel.load.adapters.known)


def _revision(channel: ChannelClient) -> str:
    """The revision of its replica's weights, as far as this ingress has heard."""
    return "" if channel.load is None else channel.load.weights
