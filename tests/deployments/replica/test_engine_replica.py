"""An engine replica without Serve: who retires it, and long prompts beside the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.checkpoints import model_info
from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.config.ingress import IngressConfig
from app.config.model import ModelConfig
from app.config.router import RouterConfig
from app.deployments.admin.fleet_state import FleetState
from app.deployments.channel import serve_port
from app.deployments.channel.wire import ControlMessage, PixelsGoneError, SecludedError, decode_frame, encode
from app.deployments.replica import ending, engine_replica, grammar_queue
from app.deployments.replica.canary import Canary
from app.deployments.replica.engine_replica import EngineReplica
from app.deployments.replica.intake import LONG_PROMPT_TOKENS
from app.deployments.replica.media_room import MediaRoom
from app.errors import EngineDeadError, InvalidRequestError, MantaError, OverloadedError
from app.records.encoder_info import EncoderInfo
from app.records.encoder_input import encoder_input_of
from app.records.media import MediaAsk, MediaItem
from app.records.request import EngineRequest, Placement
from app.records.request_bounds import RequestBounds
from app.records.sampling_params import SamplingParams
from app.structured.structured_outputs import StructuredOutputs
from tests import limits
from tests.deployments.fake_engine import REFUSED_SEED, FakeEngine
from tests.limits import run, until


class GatedEngine(FakeEngine):
    """Takes its time to accept a request; aborts what it does not know in vain, as the real one does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = threading.Event()
        self.threads: list[threading.Thread] = []
        self.added: list[EngineRequest] = []

    def add_request(self, request: EngineRequest) -> None:
        self.threads.append(threading.current_thread())
        grammar = request.sampling.structured_outputs
        if len(request.prompt_token_ids) > LONG_PROMPT_TOKENS or (grammar and not self.knows_grammar(grammar)):
            assert self.gate.wait(limits.patience_s())
        self.added.append(request)
        super().add_request(request)

    def knows_grammar(self, spec: StructuredOutputs) -> bool:
        return spec.regex == "known"


class Replica(EngineReplica):
    """One that is stopped by hand, not by the garbage collector."""

    def __del__(self) -> None:  # type: ignore[override]
        pass

    @property
    def engine(self) -> GatedEngine:
        assert isinstance(self._engine, GatedEngine)
        return self._engine

    async def channel(self, channel_id: str, ingress_id: str) -> Any:
        frames = self.open_channel(channel_id, ingress_id, target="r1")
        await anext(frames)  # type: ignore[arg-type]
        return frames

    async def tell(self, channel_id: str, draining: bool, aborts: list[Any] | None = None, close: bool = False) -> None:
        await self.control(encode(ControlMessage(channel_id, aborts or [], [], close, draining)), "r1")

    async def submit_one(self, channel_id: str, stream_id: str, request: EngineRequest) -> MantaError | None:
        (refusal,) = await self.submit(channel_id, [(stream_id, request)], "r1")
        return refusal

    async def accepting(self) -> bool:
        return (await self.ping("somebody")).accepting


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Replica], Coroutine[Any, Any, None]]], None]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"), rank=None)
    monkeypatch.setattr(engine_replica.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(engine_replica, "load_block_hash_key", lambda: bytes(32))

    async def main(scene: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
        replica = object.__new__(Replica)
        model = ModelConfig(name="m", engine=EngineConfig(model="tiny-chat"))
        await replica.__init__(model, IngressConfig(), RouterConfig(), GatedEngine)  # type: ignore[misc]
        try:
            await scene(replica)
        finally:
            replica.engine.gate.set()
            await EngineReplica.__del__(replica)

    return lambda scene: run(main(scene))


@pytest.fixture
def play_with_admin(play: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As `play`, with an Admin that says what the fleet is once `known` is set."""
    known = asyncio.Event()

    async def ask(self: Any) -> FleetState:
        await known.wait()
        return FleetState()

    monkeypatch.setattr(engine_replica.SharedState, "ask", ask)
    monkeypatch.setattr(Replica, "__init__", partialmethod(EngineReplica.__init__, has_admin=True))
    return lambda scene: play(lambda replica: scene(replica, known))


def test_one_that_cannot_join_its_fleet_ends(play_with_admin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(self: Any) -> FleetState:
        raise RuntimeError("no handle")

    monkeypatch.setattr(engine_replica.SharedState, "ask", ask)
    gone: list[str] = []
    monkeypatch.setattr(ending.Ending, "go", lambda self, why: gone.append(why))

    async def scene(replica: Replica, known: asyncio.Event) -> None:
        assert not await replica.accepting()
        await until(lambda: bool(gone))
        assert gone == ["could not join its fleet: RuntimeError: no handle"]

    play_with_admin(scene)


def test_takes_requests_once_it_is_what_the_fleet_is(play_with_admin: Any) -> None:
    async def scene(replica: Replica, known: asyncio.Event) -> None:
        frames = await replica.channel("one", "ingress-1")
        assert not await replica.accepting()
        assert isinstance(await replica.submit_one("one", "0", request()), EngineDeadError)
        assert (await replica.fleet_member()).state is None
        assert not await replica.tell_fleet_state(FleetState(epoch=1), "r1"), "it will ask"
        known.set()
        await until(lambda: replica._member.state is not None)
        assert await replica.accepting()
        assert await replica.submit_one("one", "0", request()) is None
        assert await replica.tell_fleet_state(FleetState(epoch=2), "r1")
        assert await replica.fleet_state() == FleetState(epoch=2)
        await frames.aclose()

    play_with_admin(scene)


def test_drained_and_back(play: Any) -> None:
    async def scene(replica: Replica) -> None:
        frames = await replica.channel("one", "ingress-1")
        assert await replica.submit_one("one", "0", request()) is None
        assert await replica.drain(True, False, "r1")
        assert not await replica.accepting()
        assert replica._hub.num_streams == 1, "what runs stays"
        assert (await replica.fleet_member()).is_drained
        assert isinstance(await replica.submit_one("one", "1", request()), EngineDeadError)
        await replica.drain(True, True, "r1")
        assert replica._hub.num_streams == 0, "what runs goes on elsewhere"
        await replica.drain(False, False, "r1")
        assert await replica.accepting()
        await frames.aclose()

    play(scene)


def request(num_tokens: int = 4, seed: int = 0) -> EngineRequest:
    return EngineRequest("a", [5] * num_tokens, SamplingParams(max_tokens=100_000, seed=seed))


def test_one_stale_ingress_does_not_retire_the_replica(play: Any) -> None:
    async def scene(replica: Replica) -> None:
        channels = [await replica.channel("one", "ingress-1"), await replica.channel("two", "ingress-2")]
        await replica.tell("one", draining=True)
        assert await replica.accepting()
        assert await replica.submit_one("two", "0", request()) is None
        await replica.tell("two", draining=True)
        assert not await replica.accepting(), "a ping alone does not bring it back"
        assert isinstance(await replica.submit_one("two", "1", request()), EngineDeadError)
        await replica.tell("one", draining=False)  # revived
        assert await replica.accepting()
        assert len(channels) == 2

    play(scene)


def test_retired_while_the_last_ingress_leaves_until_one_comes_back(play: Any) -> None:
    async def scene(replica: Replica) -> None:
        left = await replica.channel("one", "ingress-1")
        await replica.tell("one", draining=True, close=True)
        assert [frame async for frame in left] == []
        assert not await replica.accepting()
        back = await replica.channel("new", "ingress-1")
        assert await replica.accepting()
        await back.aclose()  # lost, not retired
        assert await replica.accepting()

    play(scene)


def test_long_prompts_are_prepared_beside_the_event_loop(play: Any) -> None:
    async def scene(replica: Replica) -> None:
        frames = await replica.channel("one", "ingress-1")
        long = asyncio.create_task(replica.submit_one("one", "0", request(LONG_PROMPT_TOKENS + 1)))
        await until(lambda: len(replica.engine.threads) == 1)
        assert await replica.submit_one("one", "1", request()) is None  # while the long one is not done
        assert not long.done()
        replica.engine.gate.set()
        assert await long is None
        assert [thread is threading.main_thread() for thread in replica.engine.threads] == [False, True]
        refused = await replica.submit_one("one", "2", request(LONG_PROMPT_TOKENS + 1, REFUSED_SEED))
        assert isinstance(refused, InvalidRequestError)
        assert replica.engine.stats().num_running == 2
        await frames.aclose()
        assert replica.engine.stats().num_running == 0

    play(scene)


def test_a_replica_is_one_streams_once_nothing_else_is_on_its_way_into_the_engine(play: Any) -> None:
    """Also not a long prompt that is still looked at; and until its ingress shares it, or is gone."""

    async def scene(replica: Replica) -> None:
        frames = [await replica.channel("one", "ingress-1"), await replica.channel("two", "ingress-2")]
        assert await replica.submit_one("two", "0", request()) is None
        long = asyncio.create_task(replica.submit_one("two", "1", request(LONG_PROMPT_TOKENS + 1)))
        await until(lambda: len(replica.engine.threads) == 2)
        alone = asyncio.create_task(replica.seclude("one", "7", "r1"))
        await until(lambda: replica._hub.num_streams == 0)
        assert isinstance(await replica.submit_one("two", "2", request()), SecludedError)
        assert not await replica.seclude("two", "3", "r1")
        assert not alone.done()
        replica.engine.gate.set()
        assert await alone
        await long
        assert replica.engine.stats().num_running == 0
        assert isinstance(await replica.submit_one("one", "8", request()), SecludedError)
        assert await replica.submit_one("one", "7", request()) is None
        await replica.control(encode(ControlMessage("one", [], [], shared=("7",))), "r1")
        assert await replica.submit_one("two", "4", request()) is None
        assert await replica.seclude("two", "5", "r1")
        await frames[1].aclose()  # an ingress that is lost
        assert await replica.submit_one("one", "9", request()) is None
        await replica.control(encode(ControlMessage("one", [], [], shared=("10",))), "r1")  # overtakes its call
        assert not await replica.seclude("one", "10", "r1")
        await frames[0].aclose()

    play(scene)


def test_requests_that_come_together_are_answered_one_by_one(play: Any) -> None:
    """Short prompts that are long together are not prepared on the event loop, either."""

    async def scene(replica: Replica) -> None:
        frames = await replica.channel("one", "ingress-1")
        requests = [(str(i), request(LONG_PROMPT_TOKENS // 2)) for i in range(3)]
        requests[1] = ("1", request(4, REFUSED_SEED))
        refusals = await replica.submit("one", requests, "r1")
        assert [type(refusal) for refusal in refusals] == [type(None), InvalidRequestError, type(None)]
        assert replica.engine.stats().num_running == 2
        assert threading.main_thread() not in replica.engine.threads[:1]
        await frames.aclose()
        assert replica.engine.stats().num_running == 0

    play(scene)


@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
def test_an_abort_that_overtakes_a_long_prompt_finds_it(play: Any, how: str) -> None:
    async def scene(replica: Replica) -> None:
        frames = await replica.channel("one", "ingress-1")
        long = asyncio.create_task(replica.submit_one("one", "0", request(LONG_PROMPT_TOKENS + 1)))
        await until(lambda: len(replica.engine.threads) == 1)
        if how == "close":
            await frames.aclose()
        else:
            if how == "cancel":  # the ingress waits no longer, and says so
                long.cancel()
            await replica.tell("one", draining=False, aborts=[("0", "abort")])
        assert replica.engine.stats().num_running == 0
        replica.engine.gate.set()
        await asyncio.wait([long])
        await until(lambda: ended == ["a/one/0"])
        assert replica.engine.stats().num_running == 0

    ended: list[str] = []
    finish = GatedEngine._finish

    def note(self: GatedEngine, running: Any, reason: str) -> None:
        ended.append(running.request.request_id)
        finish(self, running, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatedEngine, "_finish", note)
        play(scene)


def grammar_request(number: int, regex: str, tenant: str) -> EngineRequest:
    params = SamplingParams(seed=number, max_tokens=2, structured_outputs=StructuredOutputs(regex=regex))
    return EngineRequest(f"g{number}", [10, 11, 12], params, placement=Placement(tenant=tenant))


def test_known_grammars_go_first_and_tenants_take_turns_with_new_ones(play: Any) -> None:
    """Eight grammars that were refused held one that was cached up for seven seconds."""

    async def scene(replica: Replica) -> None:
        frames = await replica.channel("c1", "i1")

        def submit(number: int, regex: str, tenant: str) -> asyncio.Task[Any]:
            asked = replica.submit_one("c1", str(number), grammar_request(number, regex, tenant))
            return asyncio.create_task(asked)

        hostile = [submit(i, f"new {i}", "hostile") for i in range(4)]
        await until(lambda: len(replica.engine.threads) == 1)  # one is being compiled, the others wait
        assert await submit(4, "known", "hostile") is None
        neighbour = submit(5, "new 5", "neighbour")
        await until(lambda: replica._intake.num_waiting_grammars == 4)
        replica.engine.gate.set()
        assert await asyncio.gather(*hostile, neighbour) == [None] * 5
        assert [own.sampling.seed for own in replica.engine.added] == [4, 0, 1, 5, 2, 3]
        await frames.aclose()

    play(scene)


def test_grammars_that_wait_are_bounded_for_each_tenant(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_WAITING_GRAMMARS", 8)

    async def scene(replica: Replica) -> None:
        frames = await replica.channel("c1", "i1")
        asked = [
            asyncio.create_task(replica.submit_one("c1", str(i), grammar_request(i, f"new {i}", "hostile")))
            for i in range(6)
        ]
        await until(lambda: sum(task.done() for task in asked) == 3)
        assert all(isinstance(task.result(), OverloadedError) for task in asked if task.done())
        waiting = [task for task in asked if not task.done()]
        replica.engine.gate.set()
        assert await asyncio.gather(*waiting) == [None] * 3
        await frames.aclose()

    play(scene)


def test_a_new_grammar_that_waits_too_long_is_refused_by_name(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress gave the replica up meanwhile, and told of one that cannot be reached."""
    assert grammar_queue.MAX_WAIT_S < serve_port.SUBMIT_TIMEOUT_S
    monkeypatch.setattr(grammar_queue, "MAX_WAIT_S", limits.scaled_s(0.2))

    async def scene(replica: Replica) -> None:
        frames = await replica.channel("c1", "i1")
        two = [(str(i), grammar_request(i, "of two choices", "a")) for i in (0, 1)]
        waiting: list[asyncio.Task[Any]] = []
        while not replica.engine.threads:  # on a busy machine a thread may begin too late: nothing is compiled then
            waiting = [task := asyncio.create_task(replica.submit("c1", two, "r1"))]
            await until(lambda task=task: replica.engine.threads or task.done())
        waiting += [asyncio.create_task(replica.submit("c1", [("2", grammar_request(2, "another", "b"))], "r1"))]
        refusals = [one for answer in await asyncio.gather(*waiting) for one in answer]
        assert len(refusals) == 3
        for refusal in refusals:
            assert isinstance(refusal, OverloadedError)
            assert "compiled one at a time" in refusal.message
        replica.engine.gate.set()
        await until(lambda: len(replica.engine.added) == 1)  # it was compiled in the end, and is wanted no more
        await until(lambda: not replica.engine._requests)
        assert len(replica.engine.threads) == 1
        await frames.aclose()

    play(scene)


def test_control_calls_are_answered_in_time(play: Callable[..., None]) -> None:
    async def scene(replica: Replica) -> None:
        done = await replica.run_control("reset", {"tier": "all"}, limits.patience_s())
        assert (done.replica_id, done.result, done.error) == ("r1", ["reset", {"tier": "all"}], None)
        refused = await replica.run_control("refuse", {}, limits.patience_s())
        assert isinstance(refused.error, InvalidRequestError)
        assert refused.error.param == "what"
        late = await replica.run_control("wait", {}, limits.AT_ONCE_S)
        assert isinstance(late.error, EngineDeadError)
        assert "not done within" in late.error.message

    play(scene)


def test_sigterm_gives_every_request_up_and_then_ends_the_process(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(ending.os, "_exit", exits.append)

    async def scene(replica: Replica) -> None:
        frames = [await replica.channel(name, f"i-{name}") for name in ("c1", "c2")]
        for number, name in enumerate(("c1", "c2", "c2")):
            assert await replica.submit_one(name, str(number), request()) is None
        os.kill(os.getpid(), signal.SIGTERM)
        outputs = [
            [one for frame in [decode_frame(data) async for data in of] for one in frame.outputs] for of in frames
        ]
        given_up = [[one.request_id for one in of if one.finish_reason == "abort"] for of in outputs]
        assert given_up == [["0"], ["1", "2"]]
        assert not await replica.accepting()
        assert isinstance(await replica.submit_one("c1", "9", request()), EngineDeadError)
        await until(lambda: exits == [1])
        assert replica.engine.stats().num_running == 0

    play(scene)


def test_all_that_is_read_of_a_hubs_model_is_of_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(*place: str | None) -> Path:
        asked.append(place)
        return ASSETS / "tiny-chat"

    monkeypatch.setattr(model_info, "fetch_description", fetch)
    config = EngineConfig(model="org/model", revision="v1", download_dir="/models")
    for read in (engine_replica._revision, engine_replica._canary_work, engine_replica._max_model_len):
        read(config)
    assert asked == [("org/model", "v1", "/models")] * 3


def test_pixels_without_room_are_refused_before_the_engine(play: Any) -> None:
    """The client may come back; the stream is not left open."""
    item = MediaItem("image", b"d" * 16, 0, 1, (1, 1, 1), (60,), bytes(60))
    shows = dataclasses.replace(request(), asks=(MediaAsk((item,)),))

    async def scene(replica: Replica) -> None:
        replica._intake._media = MediaRoom(100, replica._hub.has)
        frames = await replica.channel("c", "i")
        assert await replica.submit_one("c", "1", shows) is None
        other = dataclasses.replace(
            shows, asks=(MediaAsk((dataclasses.replace(item, digest=b"e" * 16, pixels=b"1" * 60),)),)
        )
        assert isinstance(await replica.submit_one("c", "2", other), OverloadedError)
        assert len(replica.engine.added) == 1
        assert not any("/2" in name for name in replica._hub._streams)
        await frames.aclose()

    play(scene)


def test_pixels_that_came_before_need_not_come_again(play: Any) -> None:
    item = MediaItem("image", b"d" * 16, 0, 1, (1, 1, 1), (60,), bytes(60))
    whole = dataclasses.replace(request(), asks=(MediaAsk((item,)),))
    light = dataclasses.replace(whole, asks=(MediaAsk((dataclasses.replace(item, pixels=b""),)),))

    async def scene(replica: Replica) -> None:
        frames = await replica.channel("c", "i")
        assert isinstance(await replica.submit_one("c", "1", light), PixelsGoneError)
        assert await replica.submit_one("c", "1", whole) is None  # the stream is free again
        assert await replica.submit_one("c", "2", light) is None
        assert [one.asks for one in replica.engine.added] == [whole.asks] * 2
        await frames.aclose()

    play(scene)


def test_the_canary_of_a_model_that_hears_hears_silence(tmp_path: Path) -> None:
    """Or the engine refuses it, and the replica counts as one that does not answer."""
    whisper = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 8}
    fields = {"max_source_positions": 20, "vocab_size": 50, "d_model": 16, "decoder_layers": 1, "encoder_layers": 1}
    heads = {"decoder_attention_heads": 2, "encoder_attention_heads": 2, "max_target_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps({**whisper, **fields, **heads}))
    work, asks = engine_replica._canary_work(EngineConfig(model=str(tmp_path)))
    bounds = RequestBounds(50, (), 16, encoder=EncoderInfo.of(ModelInfo.from_directory(str(tmp_path))))
    sent: list[EngineRequest] = []
    clock = iter(range(0, 1000, 10))
    canary = Canary(5.0, lambda request: sent.append(bounds.settle(request)), work, asks, clock=lambda: next(clock))
    canary.tick()
    assert [encoder_input_of(request.asks) for request in sent] == [asks[0]]
