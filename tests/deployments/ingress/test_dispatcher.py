"""Where an ingress sends the choices of a prompt, over replicas in the same process and a Router of two minds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx
import msgspec
import openai
import pytest
from ray import cloudpickle

from app.api.engine_client import PromptPlace, RouteInfo
from app.api.http.errors import error_response
from app.config.admission import AdmissionConfig
from app.config.autoscaling import AutoscalingConfig
from app.config.ingress import IngressConfig
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.channel.serve_port import EngineHandles, ServePort
from app.deployments.channel.wire import decode_control
from app.deployments.ingress import continuation
from app.deployments.ingress.answer_limit import AnswerLimit
from app.deployments.ingress.claims import claim_of
from app.deployments.ingress.continuation import OUTLIVED_TOKENS, Continuation
from app.deployments.ingress.dispatcher import Dispatcher
from app.deployments.ingress.router_client import RouterClient
from app.deployments.ingress.waiting_room import WaitingRoom
from app.deployments.router.admission import Admission, Answer
from app.deployments.router.prompt_hasher import PromptHasher
from app.deployments.router.question import Question
from app.deployments.router.retry_budget import RetryBudget
from app.deployments.routing.claim import Claim, Rejection, Wait
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies.base import Decision, RouteQuery
from app.deployments.routing.policies.power_of_two import PowerOfTwo
from app.errors import (
    DeadlineError,
    EngineDeadError,
    EngineHeldError,
    MantaError,
    OverloadedError,
    PoisonedRequestError,
)
from app.records.block_hash import hash_blocks, root_hash
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput
from app.records.request import Deadline, EngineRequest, Placement, ServiceClass
from app.records.sampling_params import SamplingParams
from app.records.stats import QueuedWork
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot
from app.telemetry.request_record import GenerationRecord
from tests import limits
from tests.limits import run, until

N = 8
NETWORK_TURNS = 300  # turns of the event loop while a call is on its way
KEY = b"a secret for tests"


class Replica:
    """A port, and an engine that answers each request with one token at once; dead ones refuse everything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hub = ChannelHub(self, 64, 8.0)
        self.served: list[str] = []
        self.dead = False
        self.die: Callable[[], None] | None = None  # of any request, once it has been taken
        self.dies_while_asked = ""  # "channel" or "call": what tells first that it died of taking a request
        self.requests: list[EngineRequest] = []
        self.running: dict[str, EngineRequest] = {}  # those that wait for `release`
        self.holds = self.gives_up = self.is_full = False
        self.begun: dict[str, int] = {}
        self.tokens_at_once = 0  # not 0: a request's tokens come one by one, and tell how many came before
        self.dies_at = 0  # so many tokens, once
        self.poison = "no such request"  # of which it dies at the third token
        self.num_deaths = 0
        self.revision = "one"  # of its weights
        self.held = ""

    def abort(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.running.pop(name, None)

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...

    async def open_channel(self, channel_id: str, ingress_id: str) -> Any:
        channel = self.hub.open(channel_id, ingress_id)
        load = LoadReport("m", self.name, "1", True, 0, 0, 0, 64, 16, 0, weights=self.revision, held=self.held)
        channel.send([], load=load)
        async for frame in channel.frames():
            yield frame

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        if self.dies_while_asked:
            self.served += [request.request_id for _, request in requests]
            await self._die_while_asked()
        return [self._submit_one(channel_id, *one) for one in requests]

    async def _die_while_asked(self) -> None:
        if self.dies_while_asked == "call":
            asyncio.get_running_loop().call_later(0.05, self.hub.fail, "its process ended")
            raise ConnectionError("the call broke off")
        self.hub.fail("its process ended")
        await asyncio.Event().wait()

    def _submit_one(self, channel_id: str, stream_id: str, request: EngineRequest) -> MantaError | None:
        if self.dead:
            return EngineDeadError(f"{self.name} is dead")
        if self.is_full:
            return OverloadedError(f"{self.name} is full")
        self.served.append(request.request_id)
        self.requests.append(request)
        if self.die is not None:
            asyncio.get_running_loop().call_soon(self.die)
            return None
        request = replace(request, request_id=f"{request.request_id}/{channel_id}/{stream_id}")  # as EngineReplica
        self.hub.add(channel_id, stream_id, request.request_id)
        if self.holds:
            self.running[request.request_id] = request
        elif self.tokens_at_once:
            asyncio.get_running_loop().call_soon(self._generate, request, len(request.output_token_ids))
        else:
            self._answer(request)
        return None

    def _answer(self, request: EngineRequest) -> None:
        reason: Any = "abort" if self.gives_up else "length"
        self.hub.dispatch([EngineOutput(request.request_id, [] if self.gives_up else [1], reason)])

    def _generate(self, request: EngineRequest, number: int) -> None:
        last = number + 1 == request.max_tokens
        self.hub.dispatch([EngineOutput(request.request_id, [number], "length" if last else None)])
        num_begun = self.begun.setdefault(request.request_id, number)
        if request.request_id.startswith(self.poison) and number == num_begun + 2:
            self.num_deaths += 1
            self.hub.fail("its engine died")
        elif number + 1 == self.dies_at:
            self.dies_at = 0
            self.hub.fail("its engine died")
        elif not last and self.hub.has(request.request_id):
            asyncio.get_running_loop().call_soon(self._generate, request, number + 1)

    def release(self) -> None:
        """Answer what was held."""
        self.holds = False
        for request in self.running.values():
            self._answer(request)
        self.running.clear()

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        return self.hub.seclude(channel_id, stream_id)

    async def control(self, message: bytes) -> None:
        self.hub.control(decode_control(message))


class FarReplica(Replica):
    """One that is reached as over a Serve handle: Ray pickles each argument by itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.num_bytes = 0
        self.num_prompts = 0  # lists of token ids that arrived
        handles = cast(EngineHandles, SimpleNamespace(submit=SimpleNamespace(remote=self.remote)))
        self._port = ServePort(handles, name)

    async def submit(self, *arguments: Any) -> Any:
        return await self._port.submit(*arguments)

    async def remote(self, *arguments: Any, target: str) -> Any:
        assert target == self.name
        pickles = [cloudpickle.dumps(argument) for argument in arguments]
        self.num_bytes += sum(map(len, pickles))
        for _ in range(NETWORK_TURNS):
            await asyncio.sleep(0)
        channel_id, requests = map(cloudpickle.loads, pickles)
        self.num_prompts += len({id(request.prompt_token_ids) for _, request in requests})
        return await super().submit(channel_id, requests)


class TurningRouter:
    """Another replica at each call."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.hashes: list[bytes] = []
        self.sessions: list[str] = []
        self.excluded: list[tuple[str, ...]] = []
        self.claims: list[Claim | None] = []
        self.answers: list[Answer | None] = []  # that come first

    async def remote(self, questions: list[Question]) -> list[Answer | None]:
        await asyncio.sleep(0)
        return [self.answer(question) for question in questions]

    def answer(self, question: Question) -> Answer | None:
        self.claims.append(question.claim)
        if self.answers:
            return self.answers.pop(0)
        self.asked.append((question.num_prompt_tokens, question.max_tokens))
        self.hashes.append(question.block_hashes)
        self.sessions.append(question.session)
        self.excluded.append(question.excluded)
        return Decision("ab"[len(self.asked) % 2], "exact")


class Stage:
    """A dispatcher as an ingress has it, but for Serve's handles."""

    def __init__(self, names: str = "ab", beside: Stage | None = None) -> None:
        """`beside`: of another ingress, over the same replicas."""
        self.replicas = beside.replicas if beside else {name: Replica(name) for name in names}
        self.router = TurningRouter()
        self.pool = ReplicaPool("m", "i2" if beside else "i", IngressConfig(), self.discover, self.replicas.__getitem__)
        self.recorder = MetricsRecorder({"ingress": "i"}, scope="ingress")
        self.client = RouterClient(self.router, PromptHasher(KEY), limits.patience_s())
        self.dispatcher = Dispatcher(self.pool, self.client, self.recorder, num_replicas=len(names))

    async def discover(self) -> Discovery:
        return Discovery(frozenset(self.replicas), complete=True)

    async def ask(self, prompt: str, num_choices: int = N, num_tokens: int = 3) -> set[str | None]:
        """All choices of one prompt at the same time; the replicas that served them."""
        place, tokens = PromptPlace(), list(range(1000, 1000 + num_tokens))
        choices = (self._choice(f"{prompt}{i}", place, tokens) for i in range(num_choices))
        return set(await asyncio.gather(*choices))

    async def _choice(self, name: str, place: PromptPlace, tokens: list[int] | None = None) -> str | None:
        request = EngineRequest(name, tokens or [1, 2, 3], SamplingParams(max_tokens=5, seed=0, n=N))
        route = RouteInfo(place=place)
        async with aclosing(self.dispatcher.outputs(request, route)) as outputs:
            assert [output.new_token_ids async for output in outputs] == [[1]]
        return route.replica_id


@pytest.fixture
def play() -> Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], None]:
    return lambda scene: perform(scene, Stage())


def perform(scene: Callable[[Stage], Coroutine[Any, Any, None]], stage: Stage) -> None:
    """`scene` on `stage`, once all its replicas are found."""

    async def main() -> None:
        stage.pool.finder.start()
        try:
            await until(lambda: len(stage.pool.live()) == len(stage.replicas))
            await scene(stage)
        finally:
            await stage.pool.close()

    run(main())


def test_all_choices_of_a_prompt_go_to_one_replica(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        assert await stage.ask("x") == {"b"}
        assert len(stage.replicas["b"].served) == N
        assert stage.router.asked == [(3, 5 * N)]  # once, with the tokens of all
        assert await stage.ask("y") == {"a"}  # another prompt, another place

    play(scene)


def test_a_prompt_travels_once_and_not_with_each_choice() -> None:
    """128 choices of 8,192 tokens: the first choice takes the prompt along, and so do those that come meanwhile."""

    async def scene(stage: Stage) -> None:
        assert await stage.ask("x", 128, 8192) == {"b"}
        replica = stage.replicas["b"]
        assert isinstance(replica, FarReplica)
        assert len(replica.served) == 128
        prompt = len(cloudpickle.dumps(list(range(1000, 1000 + 8192))))
        assert replica.num_prompts == 2
        assert replica.num_bytes < 3 * prompt + 128 * 200

    stage = Stage()
    stage.replicas.update({name: FarReplica(name) for name in "ab"})
    perform(scene, stage)


def test_choices_move_together_when_their_replica_is_lost(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.replicas["b"].dead = True
        assert await stage.ask("x") == {"a"}
        assert len(stage.replicas["a"].served) == N
        assert stage.router.excluded == [(), ("b",)]

    play(scene)


def poisoned(stage: Stage, names: str) -> None:
    """The replicas of `names` die of any request, and come back."""
    for name in names:
        replica = stage.replicas[name]
        replica.die = partial(_die, replica)


def _die(replica: Replica) -> None:
    replica.hub.fail("its engine died")


async def answer(stage: Stage, request: EngineRequest, route: RouteInfo | None = None) -> list[int]:
    async with aclosing(stage.dispatcher.outputs(request, route or RouteInfo())) as outputs:
        return [token async for output in outputs for token in output.new_token_ids]


def asked(name: str, prompt: list[int], max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0))


def counted(stage: Stage, name: str = "manta:ingress_migrations_total") -> Any:
    """Its series; those that began at zero and have stayed there count nothing."""
    values = decode_snapshot(stage.recorder.snapshot()).values[name]
    return {labels: value for labels, value in values.items() if value}


def test_a_request_that_three_engines_died_of_is_refused_for_a_while() -> None:
    """The third one has it alone, while another serves: who was there goes on elsewhere, and that is no death."""

    async def scene(stage: Stage) -> None:
        poisoned(stage, "abcd")
        with pytest.raises(PoisonedRequestError, match="3 engine replicas died"):
            await answer(stage, asked("x", [1, 2, 3]))
        assert sum(len(replica.served) for replica in stage.replicas.values()) == 3
        with pytest.raises(PoisonedRequestError, match="refused for another"):
            await answer(stage, asked("again", [1, 2, 3]))
        for replica in stage.replicas.values():
            replica.die = None
        assert await answer(stage, asked("another", [1, 2, 4])) == [1]
        await until(lambda: not any(one.is_secluded for one in stage.pool.live().values()))

    perform(scene, Stage("abcd"))


@pytest.mark.parametrize("tells_first", ["channel", "call"])
def test_a_request_that_engines_die_of_before_they_have_taken_it_is_refused_too(tells_first: str) -> None:
    """Compiling its grammar, say: the replica never answers, and has it alone all the same."""

    async def scene(stage: Stage) -> None:
        for replica in stage.replicas.values():
            replica.dies_while_asked = tells_first
        with pytest.raises(PoisonedRequestError, match="3 engine replicas died"):
            await answer(stage, asked("x", [1, 2, 3]))
        assert sum(len(replica.served) for replica in stage.replicas.values()) == 3
        with pytest.raises(PoisonedRequestError, match="refused for another"):
            await answer(stage, asked("again", [1, 2, 3]))

    perform(scene, Stage("abcd"))


def test_where_no_other_replica_serves_a_suspect_is_not_tried_again() -> None:
    async def scene(stage: Stage) -> None:
        poisoned(stage, "a")
        with pytest.raises(PoisonedRequestError, match="which all others need"):
            await answer(stage, asked("x", [1, 2, 3]))
        assert len(stage.replicas["a"].served) == 2, "it came back, and was asked once more"

    perform(scene, Stage("a"))


def test_a_suspect_shares_its_replica_with_nobody() -> None:
    async def scene(stage: Stage) -> None:
        for replica in stage.replicas.values():
            replica.holds = True
        neighbours = [
            asyncio.create_task(answer(stage, asked(f"n{i}", [i, 5]), RouteInfo(place=PromptPlace("ab"[i % 2]))))
            for i in range(6)
        ]
        await until(lambda: sum(len(replica.running) for replica in stage.replicas.values()) == 6)
        way = Continuation(asked("suspect", [7]))
        way.num_deaths = 2
        channel = await stage.dispatcher._choose(way, RouteInfo())
        secluded = stage.replicas[channel.replica_id]
        await until(lambda: not secluded.running)
        later = asyncio.create_task(answer(stage, asked("later", [9])))
        await until(lambda: sum(len(replica.running) for replica in stage.replicas.values()) == 7)
        assert not secluded.running
        stage.dispatcher._seclusion.leave(way)
        for replica in stage.replicas.values():
            replica.release()
        assert await asyncio.gather(later, *neighbours) == [[1]] * 7
        assert counted(stage).keys() == {("moved",)}

    perform(scene, Stage("ab"))


@asynccontextmanager
async def another_ingress(stage: Stage) -> AsyncIterator[Stage]:
    other = Stage(beside=stage)
    other.pool.finder.start()
    try:
        await until(lambda: len(other.pool.live()) == len(stage.replicas))
        yield other
    finally:
        await other.pool.close()


def test_a_suspect_of_one_ingress_is_not_alone_with_the_poison_of_another() -> None:
    """Two engines die under both, one more under the poison alone; the innocent stream comes to its end."""

    async def scene(stage: Stage) -> None:
        for replica in stage.replicas.values():
            replica.tokens_at_once, replica.poison = 1, "poison"
        async with another_ingress(stage) as other:
            innocent = answer(stage, asked("x", [1], 300), RouteInfo(place=PromptPlace("a")))
            poison = answer(other, asked("poison", [2], 300), RouteInfo(place=PromptPlace("a")))
            tokens, error = await asyncio.gather(innocent, poison, return_exceptions=True)
        assert tokens == list(range(300))
        assert isinstance(error, PoisonedRequestError)
        assert "3 engine replicas died" in error.message
        assert counted(stage)["lost",] == 2.0, "the innocent one saw the first two"
        assert sum(replica.num_deaths for replica in stage.replicas.values()) == 3

    perform(scene, Stage("ab"))


def test_a_suspect_shares_its_replica_with_no_other_ingress() -> None:
    """Who is there goes on elsewhere, who comes goes elsewhere, and with no other replica waits."""

    async def scene(stage: Stage) -> None:
        async with another_ingress(stage) as other:
            for replica in stage.replicas.values():
                replica.holds = True
            streams = [asyncio.create_task(answer(other, asked(f"n{i}", [i, 5]), RouteInfo())) for i in range(4)]
            await until(lambda: sum(len(replica.running) for replica in stage.replicas.values()) == 4)
            way, rival = Continuation(asked("suspect", [7])), Continuation(asked("rival", [8]))
            way.num_deaths = rival.num_deaths = 2
            secluded = stage.replicas[(await stage.dispatcher._choose(way, RouteInfo())).replica_id]
            (shared,) = (replica for replica in stage.replicas.values() if replica is not secluded)
            turn = asyncio.create_task(other.dispatcher._choose(rival, RouteInfo()))
            streams += [asyncio.create_task(answer(other, asked(f"m{i}", [i, 6]), RouteInfo())) for i in range(4)]
            await until(lambda: len(shared.running) == 8)
            assert not secluded.running
            _die(shared)
            await until(lambda: list(other.pool.live()) == [secluded.name])
            streams.append(asyncio.create_task(answer(other, asked("late", [9]))))
            await until(lambda: len(other.pool.live()) == 2)
            await until(lambda: len(shared.running) == 9 + 8)  # a fake one keeps those that died with it
            assert not secluded.running
            assert not turn.done(), "two would leave no replica for the others"
            stage.dispatcher._seclusion.leave(way)
            await turn
            other.dispatcher._seclusion.leave(rival)
            for replica in stage.replicas.values():
                replica.release()
            assert await asyncio.gather(*streams) == [[1]] * 9

    perform(scene, Stage("ab"))


def test_a_time_alone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read must not keep a replica from all others; nothing is convicted after it."""

    async def scene(stage: Stage) -> None:
        way = Continuation(asked("suspect", [7]))
        way.num_deaths = 2
        channel = await stage.dispatcher._choose(way, RouteInfo())
        hub = stage.replicas[channel.replica_id].hub
        await until(lambda: not stage.dispatcher._seclusion.holds(way))
        await until(lambda: hub.seclude(channel.channel_id, "another"))

    monkeypatch.setattr(continuation, "ALONE_S", 0.0)
    perform(scene, Stage("ab"))


def test_suspects_take_turns_until_they_have_outlived_the_place_and_not_until_they_end() -> None:
    """Both are innocent; each reads on only once the other has come as far, which takes its own turn."""

    async def scene(stage: Stage) -> None:
        for replica in stage.replicas.values():
            replica.tokens_at_once, replica.dies_at = 1, 5
        stage.replicas["b"].dies_at = 8
        both = asyncio.Barrier(2)

        async def read(name: str) -> list[int]:
            tokens: list[int] = []
            route = RouteInfo(place=PromptPlace("a"))
            async with aclosing(stage.dispatcher.outputs(asked(name, [len(name)], 100), route)) as outputs:
                async for output in outputs:
                    tokens += output.new_token_ids
                    if len(tokens) == 8 + OUTLIVED_TOKENS:
                        await both.wait()
            return tokens

        streams = await asyncio.gather(read("x"), read("xx"))
        assert streams == [list(range(100))] * 2
        assert counted(stage) == {("lost",): 4.0}, "two deaths, two streams"

    perform(scene, Stage("ab"))


def test_what_dies_late_is_let_out_once_only() -> None:
    way = Continuation(asked("x", [1]))
    for num_deaths in (1, 2, 3):
        way.note_loss(died=True)
        way.add_output(EngineOutput("x", [1] * OUTLIVED_TOKENS, None))
        assert way.has_outlived == (num_deaths == 2)


def test_a_stream_goes_on_behind_what_its_client_has() -> None:
    """Also over planned moves, of which there may be any number."""

    async def scene(stage: Stage) -> None:
        for replica in stage.replicas.values():
            replica.tokens_at_once = 1
        for _ in range(4):
            moved = asked("x", [1, 2, 3], max_tokens=5)
            async with aclosing(stage.dispatcher.outputs(moved, RouteInfo())) as outputs:
                tokens = []
                async for output in outputs:
                    tokens += output.new_token_ids
                    for channel in stage.pool.live().values():
                        channel.move_requests("just so")
            assert tokens == [0, 1, 2, 3, 4]
        assert counted(stage) == {("moved",): 4.0 * 4}
        stalls = decode_snapshot(stage.recorder.snapshot()).histograms["manta:ingress_migration_stall_seconds"][()]
        assert stalls.count == 4 * 4

    perform(scene, Stage("ab"))


def test_a_stream_goes_on_with_the_weights_that_began_it() -> None:
    async def scene(stage: Stage) -> None:
        async with aclosing(stage.dispatcher.outputs(asked("x", [1, 2, 3], max_tokens=5), RouteInfo())) as outputs:
            tokens = []
            async for output in outputs:
                tokens += output.new_token_ids
                for channel in stage.pool.live().values():
                    channel.move_requests("just so")
        assert tokens == [0, 1, 2, 3, 4]
        served = [replica.requests for replica in stage.replicas.values() if replica.requests]
        assert [[len(request.output_token_ids) for request in requests] for requests in served] == [[0, 1, 2, 3, 4]]

    stage = Stage("abc")
    for replica in stage.replicas.values():
        replica.tokens_at_once, replica.revision = 1, replica.name
    perform(scene, stage)


def test_one_that_lost_its_only_replica_waits_for_it_to_come_back() -> None:
    async def scene(stage: Stage) -> None:
        replica = stage.replicas["a"]
        replica.tokens_at_once, replica.dies_at = 1, 3
        assert await answer(stage, asked("x", [1, 2, 3], max_tokens=5)) == [0, 1, 2, 3, 4]
        assert [len(request.output_token_ids) for request in replica.requests] == [0, 3]
        assert counted(stage) == {("lost",): 1.0}

    perform(scene, Stage("a"))


def test_replicas_that_go_while_the_router_is_asked_are_waited_for(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        async def all_die(*arguments: Any) -> None:
            if not stage.router.asked:
                stage.router.asked.append((0, 0))
                for replica in stage.replicas.values():
                    _die(replica)
                await until(lambda: not stage.pool.live())
                stage.pool._update(Discovery(frozenset(), complete=True))

        stage.router.remote = all_die  # type: ignore[method-assign, assignment]
        way = Continuation(asked("x", [1]))
        way.note_loss(died=True)
        assert (await stage.dispatcher._choose(way, RouteInfo())).replica_id in "ab"

    play(scene)


def test_one_that_moved_does_not_stick_to_a_full_replica() -> None:
    async def scene(stage: Stage) -> None:
        first, full, other = (stage.replicas[name] for name in "abc")
        first.tokens_at_once = other.tokens_at_once = 1
        first.dies_at, full.is_full, place = 3, True, PromptPlace("a")
        route = RouteInfo(place=place)
        async with aclosing(stage.dispatcher.outputs(asked("x", [1, 2, 3], max_tokens=5), route)) as outputs:
            tokens = []
            async for output in outputs:
                tokens += output.new_token_ids
                if len(tokens) == 3:
                    place.replica_id = "b"  # as if the other choices of the prompt had gone there
        assert tokens == [0, 1, 2, 3, 4]
        assert len(other.served) + len(first.served) == 2

    perform(scene, Stage("abc"))


def test_a_request_waits_for_the_first_replica_of_a_model_that_sleeps() -> None:
    async def scene(stage: Stage) -> None:
        room = WaitingRoom("m", AutoscalingConfig(min_replicas=0, max_replicas=1, wake_wait_s=1e6))
        stage.dispatcher = Dispatcher(stage.pool, stage.client, stage.recorder, waiting_room=room)
        first = asyncio.create_task(stage._choice("x", PromptPlace()))
        await until(lambda: room.num_requests == 1)
        stage.replicas["a"] = Replica("a")  # who waited has started it
        assert await first == "a"
        assert room.num_requests == 0

    perform(scene, Stage(""))


def hold(replica: Replica, why: str) -> None:
    """What a control call makes a replica tell its ingresses."""
    replica.held = why
    replica.hub.heartbeat(LoadReport("m", replica.name, "1", True, 0, 0, 0, 64, 16, 0, held=why))


def test_a_request_goes_where_no_operator_holds_it() -> None:
    async def scene(stage: Stage) -> None:
        hold(stage.replicas["a"], "paused")
        await until(lambda: any(channel.held for channel in stage.pool.live().values()))
        assert stage.pool.held == ""
        assert await stage.ask("x") == {"b"}

    perform(scene, Stage("ab"))


def test_a_request_waits_while_an_operator_holds_all_and_not_for_ever() -> None:
    async def scene(stage: Stage) -> None:
        room = WaitingRoom("m", held_wait_s=1e6)
        stage.dispatcher = Dispatcher(stage.pool, stage.client, stage.recorder, waiting_room=room)
        hold(stage.replicas["a"], "an operator has paused the engine")
        await until(lambda: stage.pool.held)
        waits = asyncio.create_task(stage._choice("x", PromptPlace()))
        await limits.async_pause(0.1)
        assert not waits.done()
        assert stage.replicas["a"].served == []
        room._held_wait_s = 0.0
        with pytest.raises(EngineHeldError, match="an operator has paused the engine") as told:
            await stage._choice("y", PromptPlace())
        assert (told.value.status, told.value.code) == (503, "engine_held")
        assert room.num_requests == 0, "which would start replicas, and those would be paused as well"
        hold(stage.replicas["a"], "")
        assert await waits == "a"

    perform(scene, Stage("a"))


def test_an_engine_that_gives_a_request_up_has_not_died() -> None:
    async def scene(stage: Stage) -> None:
        stage.replicas["b"].gives_up = True
        assert await answer(stage, asked("x", [1, 2, 3]), RouteInfo(place=PromptPlace(replica_id="b"))) == [1]
        assert counted(stage) == {("moved",): 1.0}

    perform(scene, Stage("ab"))


def test_one_death_costs_the_client_nothing() -> None:
    """Nor do refusals count as deaths: they end when no replica is left."""

    async def scene(stage: Stage) -> None:
        poisoned(stage, "b")
        stage.replicas["c"].dead = stage.replicas["d"].dead = True
        assert await stage._choice("x", PromptPlace(replica_id="b")) == "a"
        assert stage.replicas["b"].served == ["x"]
        for replica in stage.replicas.values():
            replica.dead = True
        with pytest.raises(EngineDeadError, match=r"no engine replica .* may be sent again"):
            await stage._choice("y", PromptPlace())

    perform(scene, Stage("abcd"))


def test_sdks_do_not_repeat_a_poisoned_request() -> None:
    response = error_response(PoisonedRequestError("two died"), {"type": "http", "path": "/v1/chat/completions"})
    assert response.status_code == 500
    httpx_response = httpx.Response(500, headers=dict(response.headers), content=bytes(response.body))
    assert not openai.OpenAI(api_key="none")._should_retry(httpx_response)
    assert not anthropic.Anthropic(api_key="none")._should_retry(httpx_response)


def test_without_a_router_they_stay_together(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.client._asleep_until = float("inf")
        first, second = await stage.ask("x"), await stage.ask("y")
        assert len(first) == len(second) == 1
        assert first != second  # the load of all N choices counts
        assert stage.router.asked == []

    play(scene)


def test_a_prompt_counts_once_and_its_outputs_n_times() -> None:
    request = EngineRequest("a", [1] * 100, SamplingParams(max_tokens=7, n=N))
    assert RouteQuery.of_prompt(request).num_tokens == 100 + N * 7
    assert RouteQuery.of(request).num_tokens == 100 + 7


def test_the_router_is_told_the_hashes_of_the_engines_own_making(play: Any) -> None:
    """Blocks of the prompt without its last token, under the model revision and the request's own root."""

    async def scene(stage: Stage) -> None:
        load = stage.pool.load
        assert load is not None
        await stage.ask("x")
        assert stage.router.hashes == [b""]  # these replicas cache nothing
        for channel in stage.pool.live().values():
            channel.load = msgspec.structs.replace(load, model_revision="weights")
        prompt = list(range(48))
        request = EngineRequest(
            "y", prompt, SamplingParams(max_tokens=5, seed=0), placement=Placement(cache_root=b"tenant", session="s")
        )
        async with aclosing(stage.dispatcher.outputs(request, RouteInfo())) as outputs:
            assert [output.new_token_ids async for output in outputs] == [[1]]
        root = root_hash(KEY, model="weights", cache_root=b"tenant")
        assert stage.router.hashes[-1] == b"".join(hash_blocks(KEY, root, prompt, 16)[:2])
        assert stage.router.sessions[-1] == "s"
        counts = stage.recorder.snapshot()
        assert decode_snapshot(counts).values["manta:ingress_routes_total"] == {("exact",): 2.0}

    play(scene)


def test_a_silent_router_is_counted_and_left_alone(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        async def never(*arguments: Any) -> None:
            await asyncio.Event().wait()

        stage.client._limit = AnswerLimit(0.05)
        stage.router.remote = never  # type: ignore[method-assign, assignment]
        for name in "xyz":
            assert len(await stage.ask(name)) == 1
        values = decode_snapshot(stage.recorder.snapshot()).values
        assert values["manta:ingress_routes_total"] == {("ingress",): 3.0}
        assert values["manta:ingress_route_fallbacks_total"] == {(): 3.0}

    play(scene)


def test_a_router_that_knows_no_replica_yet_is_not_a_silent_one(play: Any) -> None:
    """As when a model has just woken: the ingress knows its replicas first."""

    async def scene(stage: Stage) -> None:
        stage.router.answers = [None, Decision("gone", "exact")]
        for name in "xy":
            assert len(await stage.ask(name)) == 1
        values = decode_snapshot(stage.recorder.snapshot()).values
        assert values["manta:ingress_routes_total"] == {("ingress",): 2.0}
        assert values.get("manta:ingress_route_fallbacks_total", {}).get((), 0.0) == 0.0

    play(scene)


def test_where_one_replica_is_all_there_is_nobody_waits_for_the_router() -> None:
    """It hears of the request all the same, and is asked where there is something to say: of a queue, a deadline, a
    retry."""

    async def scene(stage: Stage) -> None:
        answers, goes_on = stage.router.remote, asyncio.Event()

        async def later(questions: list[Question]) -> list[Answer | None]:
            await goes_on.wait()
            return await answers(questions)

        stage.router.remote = later  # type: ignore[method-assign]
        assert await stage.ask("x") == {"a"}
        goes_on.set()
        await until(lambda: counted(stage, "manta:ingress_routes_total") == {("exact",): 1.0})
        assert admissions(stage) == {("default", "admitted"): 1}
        (claim,) = stage.router.claims
        stage.pool.num_ingresses = 1000  # the others may have filled the replica since its report, as far as is known
        stage.pool.count_request("a", RouteQuery(2, 5))
        stage.router.answers = [Rejection("server", 12.0, 9.5)]
        with pytest.raises(OverloadedError):
            await stage._choice("w", PromptPlace())
        stage.pool.num_ingresses = 1
        late = Placement(deadline=Deadline(50.0, False))
        again = Placement(num_retries=1)
        for placement, num_waiting in ((late, 0), (again, 0), (Placement(), 1)):
            stage.pool.book.report(LoadReport("m", "a", "1", True, 0, num_waiting, 0, 64, 16, 0))
            stage.router.answers = [Rejection("server", 12.0, 9.5)]
            request = EngineRequest("y", [1, 2], SamplingParams(max_tokens=5, seed=0), placement=placement)
            with pytest.raises(OverloadedError):
                await anext(stage.dispatcher.outputs(request, RouteInfo()))
        assert claim is not None
        assert (claim.is_retry, claim.may_wait) == (False, True), "it is counted, and not refused"

    perform(scene, Stage("a"))


def test_a_router_that_would_have_refused_counts_what_was_sent_without_it() -> None:
    """Its report of a queue came sooner than the ingress's. The trace of a request that ends before the Router answers
    says that the ingress placed it."""

    async def scene(stage: Stage) -> None:
        book, may_answer = LoadBook(PowerOfTwo()), asyncio.Event()
        queued = (QueuedWork("default", 0.3, "", 300.0),)
        measured = {"prefill_token_s": 1e-4, "decode_step_s": 0.01, "queued": queued, "begun_rate": 0.1}
        book.report(msgspec.structs.replace(LoadReport("m", "a", "1", True, 8, 9, 9, 64, 16, 0), **measured))
        admission = Admission(AdmissionConfig(), book, RetryBudget(0.2, 3))

        async def route(questions: list[Question]) -> list[Answer | None]:
            await may_answer.wait()
            return [admission.answer(question.query, question.claim) for question in questions]

        stage.router.remote = route  # type: ignore[method-assign]
        record = GenerationRecord("m", "x", 3)
        request = asked("x", [1, 2, 3])
        refused = admission.answer(RouteQuery.of_prompt(request), claim_of(Continuation(request)))
        assert isinstance(refused, Rejection)
        assert await answer(stage, request, RouteInfo(record=record)) == [1]
        (leg,) = record.legs
        assert leg.level == "ingress"
        may_answer.set()
        await until(lambda: leg.level == "load")
        assert book.load("a").routed_requests == 1

    perform(scene, Stage("a"))


def admissions(stage: Stage) -> dict[tuple[str, ...], float]:
    return cast(dict[tuple[str, ...], float], counted(stage, "manta:admission_total"))


def test_a_request_that_the_router_refuses_is_told_when_to_come_again(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        for reason, status in (("tenant", 429), ("server", 503), ("retry", 503)):
            stage.router.answers = [Rejection(cast(Any, reason), 12.0, 9.5)]
            with pytest.raises(OverloadedError) as refusal:
                await stage._choice("x", PromptPlace())
            assert (refusal.value.status, refusal.value.retry_after_s) == (status, 9.5)
            assert admissions(stage)["default", f"rejected_{reason}"] == 1
        assert not stage.replicas["a"].served + stage.replicas["b"].served, "nothing was begun"
        assert await stage._choice("y", PromptPlace()) in "ab", "it is asked again for the next one"

    play(scene)


def test_without_a_router_what_would_come_too_late_is_refused_all_the_same(play: Any) -> None:
    async def never(*arguments: Any) -> None:
        await asyncio.Event().wait()

    async def scene(stage: Stage) -> None:
        stage.client._limit = AnswerLimit(0.05)
        stage.router.remote = never  # type: ignore[method-assign, assignment]
        book = LoadBook(PowerOfTwo())
        admission = Admission(AdmissionConfig(), book, RetryBudget(0.2, 3))
        stage.dispatcher = Dispatcher(stage.pool, stage.client, stage.recorder, admission=admission)
        for name, work_s in (("a", 300.0), ("b", 200.0)):
            queued = (QueuedWork("default", 0.3, "another", 100.0), QueuedWork("default", 0.3, "", work_s))
            measured = {"prefill_token_s": 1e-4, "decode_step_s": 0.01, "queued": queued, "begun_rate": 0.1}
            book.report(msgspec.structs.replace(LoadReport("m", name, "1", True, 8, 9, 9, 64, 16, 0), **measured))
        with pytest.raises(OverloadedError):
            await stage._choice("x", PromptPlace())
        assert admissions(stage) == {("default", "rejected_tenant"): 1}
        for name in "ab":
            book.report(LoadReport("m", name, "1", True, 0, 0, 0, 64, 16, 0))
        assert await stage._choice("y", PromptPlace()) in "ab"
        assert admissions(stage)["default", "local"] == 1

    play(scene)


def test_one_that_shall_wait_waits(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.router.answers = [Wait(0.0), Wait(0.0)]
        assert await stage._choice("x", PromptPlace()) in "ab"
        assert admissions(stage) == {("default", "waited"): 1}
        stage.router.answers = []
        await stage._choice("y", PromptPlace())
        assert admissions(stage)["default", "admitted"] == 1

    play(scene)


def test_one_that_waits_for_the_router_is_demand(play: Any) -> None:
    """No engine knows of it, so the ingress' figures have to count it, and no longer than it waits."""

    async def scene(stage: Stage) -> None:
        room = stage.dispatcher._waiting_room
        stage.router.answers = [Wait(0.02)] * 1000
        choice = asyncio.create_task(stage._choice("x", PromptPlace()))
        await until(lambda: room.num_requests == 1)
        assert room.num_tokens > 0
        stage.router.answers.clear()
        await choice
        assert (room.num_requests, room.num_tokens) == (0, 0)

    play(scene)


def test_what_a_request_claims(play: Any) -> None:
    """A new one has its class, tenant and deadline; one that a replica refused is a retry of ours; one that goes on
    claims nothing."""

    async def scene(stage: Stage) -> None:
        placement = Placement(tenant="t", service_class=ServiceClass("bulk", 0.1), deadline=Deadline(50.0, True))
        asked = EngineRequest("x", [1, 2, 3], SamplingParams(max_tokens=5, seed=0), placement=placement)
        stage.replicas["b"].dead = True
        async with aclosing(stage.dispatcher.outputs(asked, RouteInfo())) as outputs:
            assert [output.new_token_ids async for output in outputs] == [[1]]
        first, second = stage.router.claims
        assert first is not None
        assert second is not None
        assert first[:2] == second[:2] == (placement.service_class, "t")
        assert first.time_left_s is not None
        assert 0 < first.time_left_s <= 50.0
        assert (first.is_retry, first.may_wait, second.is_retry, second.may_wait) == (False, False, True, True)
        moved = Continuation(asked)
        moved.note_loss(died=True)
        assert claim_of(moved) is None
        late = Continuation(replace(asked, arrival_time=asked.arrival_time - 60.0))
        with pytest.raises(DeadlineError, match="deadline of 50 s"):
            claim_of(late)

    play(scene)


def test_without_the_router_a_request_is_placed_here_and_admissions(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.client._asleep_until = float("inf")
        assert await stage._choice("x", PromptPlace()) in "ab"
        assert admissions(stage) == {("default", "local"): 1}

    play(scene)


def test_a_replica_out_of_reach_is_left_alone(play: Any) -> None:
    """After three faults in a row it is asked no more, though its channel is open; a refusal is none."""

    async def scene(stage: Stage) -> None:
        replica = stage.replicas["b"]
        submit, calls = replica.submit, []

        async def unreachable(channel_id: str, requests: Any) -> Any:
            calls.append(channel_id)
            raise ConnectionError("no way")

        replica.submit = unreachable  # type: ignore[method-assign]
        for i in range(10):
            assert await stage._choice(f"x{i}", PromptPlace()) == "a"
        assert len(calls) == 3
        replica.submit = submit  # type: ignore[method-assign]
        assert stage.dispatcher._breaker.usable(["b"]) == ["b"], "never the last one"

    play(scene)
