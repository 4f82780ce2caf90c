"""Where an ingress sends the choices of a prompt, over replicas in the same process and a Router of two minds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
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
from app.api.errors import error_response
from app.config import IngressConfig, ServeConfig
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.channel.serve_port import EngineHandles, ServePort
from app.deployments.channel.wire import LoadReport, decode_control
from app.deployments.ingress import Ingress
from app.deployments.routing.policies.base import Decision, RouteQuery
from app.deployments.routing.prompt_hasher import PromptHasher
from app.engine.kv_cache.block_hash import hash_blocks, root_hash
from app.engine.outputs import EngineOutput
from app.engine.request import EngineRequest, Placement
from app.engine.sampling_params import SamplingParams
from app.errors import EngineDeadError, MantaError, PoisonedRequestError
from app.telemetry.metrics import MetricsRecorder, decode_snapshot
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
        self.die: Callable[[], None] | None = None  # ends the next request's replica, once it has been taken

    def abort(self, request_ids: list[str]) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...

    async def open_channel(self, channel_id: str, ingress_id: str) -> Any:
        channel = self.hub.open(channel_id, ingress_id)
        channel.send([], load=LoadReport("m", self.name, "1", True, 0, 0, 0, 64, 16, 0))
        async for frame in channel.frames():
            yield frame

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        return [self._submit_one(channel_id, *one) for one in requests]

    def _submit_one(self, channel_id: str, stream_id: str, request: EngineRequest) -> MantaError | None:
        if self.dead:
            return EngineDeadError(f"{self.name} is dead")
        self.served.append(request.request_id)
        if self.die is not None:
            asyncio.get_running_loop().call_soon(self.die)
            return None
        self.hub.add(channel_id, stream_id, request.request_id)
        self.hub.dispatch([EngineOutput(request.request_id, [1], "length")])
        return None

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

    async def remote(
        self, model: str, num_prompt_tokens: int, max_tokens: int, hashes: bytes, session: str, adapter: str
    ) -> Decision:
        self.asked.append((num_prompt_tokens, max_tokens))
        self.hashes.append(hashes)
        self.sessions.append(session)
        await asyncio.sleep(0)
        return Decision("ab"[len(self.asked) % 2], "exact")


class BareIngress(Ingress):
    """One that is not stopped by the garbage collector."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Stage:
    """An ingress as its constructor leaves it, but for Serve's handles."""

    def __init__(self, names: str = "ab") -> None:
        self.replicas = {name: Replica(name) for name in names}
        self.router = TurningRouter()
        self.pool = ReplicaPool("m", "i", IngressConfig(), self.discover, self.replicas.__getitem__)
        self.ingress = object.__new__(BareIngress)
        self.ingress._config = ServeConfig.model_validate(
            {"models": [{"name": "m"}], "ingress": {"route_timeout_s": limits.patience_s()}}
        )
        self.ingress._router = self.router
        self.ingress._router_asleep_until = 0.0
        self.ingress._recorder = MetricsRecorder({"ingress": "i"}, scope="ingress")
        self.ingress._pools = {"m": self.pool}
        self.ingress._hasher = PromptHasher(KEY)

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
        async with aclosing(self.ingress._attempts("m", request, route)) as outputs:
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
        assert len(stage.router.asked) == 1

    play(scene)


def poisoned(stage: Stage, names: str) -> None:
    """The replicas of `names` die of any request."""
    for name in names:
        channel = stage.pool.live()[name]
        stage.replicas[name].die = partial(channel.close, "its engine died")


def test_a_request_that_two_engines_died_of_is_sent_to_no_third() -> None:
    async def scene(stage: Stage) -> None:
        poisoned(stage, "abc")
        with pytest.raises(PoisonedRequestError, match="2 engine replicas died while this request ran on them"):
            await stage._choice("x", PromptPlace())
        assert sum(len(replica.served) for replica in stage.replicas.values()) == 2

    perform(scene, Stage("abc"))


def test_one_death_costs_the_client_nothing() -> None:
    """Nor do refusals count as deaths: they end when no replica is left."""

    async def scene(stage: Stage) -> None:
        poisoned(stage, "b")
        stage.replicas["c"].dead = stage.replicas["d"].dead = True
        assert await stage._choice("x", PromptPlace(replica_id="b")) == "a"
        assert stage.replicas["b"].served == ["x"]
        stage.replicas["a"].dead = True
        with pytest.raises(EngineDeadError, match="no engine replica"):
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
        stage.ingress._router_asleep_until = float("inf")
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
        async with aclosing(stage.ingress._attempts("m", request, RouteInfo())) as outputs:
            assert [output.new_token_ids async for output in outputs] == [[1]]
        root = root_hash(KEY, model="weights", cache_root=b"tenant")
        assert stage.router.hashes[-1] == b"".join(hash_blocks(KEY, root, prompt, 16)[:2])
        assert stage.router.sessions[-1] == "s"
        counts = stage.ingress._recorder.snapshot()
        assert decode_snapshot(counts).values["manta:ingress_routes_total"] == {("exact",): 2.0}

    play(scene)


def test_a_silent_router_is_counted_and_left_alone(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        async def never(*arguments: Any) -> None:
            await asyncio.Event().wait()

        config = stage.ingress._config.ingress.model_copy(update={"route_timeout_s": 0.05})
        stage.ingress._config = stage.ingress._config.model_copy(update={"ingress": config})
        stage.router.remote = never  # type: ignore[method-assign, assignment]
        for name in "xyz":
            assert len(await stage.ask(name)) == 1
        values = decode_snapshot(stage.ingress._recorder.snapshot()).values
        assert values["manta:ingress_routes_total"] == {("ingress",): 3.0}
        assert values["manta:ingress_route_fallbacks_total"] == {(): 3.0}

    play(scene)
