"""Both ends of a token channel, joined in memory: order, credit, lease, gaps, deaths (I9)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from app.deployments.channel import channel_client, frame_queue
from app.deployments.channel.channel_client import ChannelClient, RequestStream
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.wire import ControlMessage, Frame, decode_control, decode_frame, encode
from app.errors import EngineDeadError, InvalidRequestError, MantaError
from app.records.load_report import LoadReport
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from tests import limits
from tests.deployments.noting_engine import NotingEngine
from tests.limits import run, until

WINDOW = 8
LOAD = LoadReport("m", "r1", "one", True, 0, 0, 0, 64, 16, 0)


class Port:
    """A replica in the same process."""

    def __init__(self, hub: ChannelHub) -> None:
        self.hub = hub
        self.refusal: MantaError | None = None
        self.num_controls = 0
        self.hang = asyncio.Event()
        self.hanging = False
        self.drop_frames: set[int] = set()

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        channel = self.hub.open(channel_id, ingress_id)
        channel.send([], load=LOAD)
        try:
            async for frame in channel.frames():
                if decode_frame(frame).sequence not in self.drop_frames:
                    yield frame
        finally:
            self.hub.drop(channel)

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        if self.hanging:
            await self.hang.wait()
        if self.refusal is None:
            for stream_id, one in requests:
                self.hub.add(channel_id, stream_id, one.request_id)
        return [self.refusal] * len(requests)

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        return self.hub.seclude(channel_id, stream_id)

    async def control(self, message: bytes) -> None:
        self.num_controls += 1
        self.hub.control(decode_control(message))


class Pair:
    """A client and its hub."""

    def __init__(self, lease_s: float = 8.0) -> None:
        self.engine = NotingEngine()
        self.hub = ChannelHub(self.engine, WINDOW, lease_s)
        self.port = Port(self.hub)
        self.lost: list[int] = []
        self.client = ChannelClient(
            self.port,
            "r1",
            "ingress",
            window=WINDOW,
            lease_s=lease_s,
            on_closed=lambda channel, num_requests: self.lost.append(num_requests),
        )

    async def open(self) -> None:
        self.client.start()
        assert await self.client.wait_open(limits.patience_s())

    def emit(self, *tokens: int, request_id: str = "a", finish: Any = None) -> None:
        self.hub.dispatch([EngineOutput(request_id, list(tokens), finish)])


def request(request_id: str = "a", num_tokens: int = 3) -> EngineRequest:
    return EngineRequest(request_id, list(range(num_tokens)), SamplingParams(max_tokens=100, seed=0))


async def take(stream: RequestStream, count: int) -> list[EngineOutput]:
    taken: list[EngineOutput] = []
    outputs = stream.outputs()
    while len(taken) < count:
        taken.append(await asyncio.wait_for(anext(outputs), limits.patience_s()))
    return taken


def test_outputs_arrive_whole_and_in_order() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        a = await pair.client.submit(request("a"))
        b = await pair.client.submit(request("b"))
        logprobs = [TokenLogprobs([7, 8], [-0.5, -1.5], [1, 2])]
        first = EngineOutput("a", [7], logprobs=logprobs, prompt_logprobs=[None, *logprobs], num_cached_tokens=2)
        pair.hub.dispatch([copy.copy(first), EngineOutput("b", [1])])
        pair.hub.dispatch([EngineOutput("b", [2]), EngineOutput("a", [9], "stop", stop_reason=9)])
        pair.hub.dispatch([EngineOutput("b", [3], "length")])
        assert await take(a, 2) == [first, EngineOutput("a", [9], "stop", stop_reason=9)]
        assert [output.new_token_ids for output in [o async for o in b.outputs()]] == [[1], [2], [3]]
        a.close()
        b.close()
        assert pair.client.num_streams == 0
        assert pair.hub.num_streams == 0
        assert pair.engine.aborted == []
        pair.client.close()

    run(main())


def test_one_frame_a_step_and_the_first_token_is_not_held() -> None:
    async def main() -> None:
        pair = Pair()
        channel = pair.hub.open("c", "ingress")
        for name in "abcd":
            pair.hub.add("c", f"stream-{name}", name)
        frames = channel.frames()
        pair.hub.dispatch([EngineOutput(name, [1]) for name in "abcd"])
        frame = decode_frame(await anext(frames))
        assert (frame.sequence, len(frame.outputs)) == (0, 4)
        pair.hub.dispatch([EngineOutput(name, [2]) for name in "ab"])
        assert decode_frame(await anext(frames)).sequence == 1

    run(main())


def test_slow_client_holds_only_its_own_request() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        slow, fast = await pair.client.submit(request("slow")), await pair.client.submit(request("fast"))
        reader = asyncio.create_task(take(fast, 3 * WINDOW))
        for i in range(3 * WINDOW):
            pair.hub.dispatch([EngineOutput("fast", [i])])
            if "slow" not in pair.engine.paused:
                pair.hub.dispatch([EngineOutput("slow", [i])])
            await limits.async_pause(0.02)  # as an engine's step: credits need their round trip
        assert len(await reader) == 3 * WINDOW
        assert pair.engine.paused == ["slow"]
        assert pair.engine.resumed == []
        assert pair.hub.num_streams == 2
        assert pair.hub.num_unpaused == 1  # "slow" waits for its client, so it is no sign of a stalled engine
        assert len(await take(slow, WINDOW)) == WINDOW  # the client reads on: the request goes on
        await until(lambda: pair.engine.resumed == ["slow"])
        assert pair.hub.num_unpaused == 2
        pair.client.close()

    run(main())


def test_no_credit_calls_for_short_answers() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        stream = await pair.client.submit(request())
        pair.emit(1, 2, finish="length")
        await take(stream, 1)
        stream.close()
        await limits.async_pause(0.2)
        assert pair.port.num_controls == 0
        pair.client.close()

    run(main())


def test_abort_reaches_the_engine_at_once() -> None:
    async def main() -> None:
        pair = Pair()
        reasons: list[tuple[str, str]] = []
        pair.hub._on_abort = lambda request_id, reason: reasons.append((request_id, reason))
        await pair.open()
        stream = await pair.client.submit(request())
        other = await pair.client.submit(request("b"))
        pair.emit(1)
        await take(stream, 1)
        stream.close("stop")
        stream.close()  # idempotent
        await until(lambda: pair.engine.aborted == ["a"])
        assert reasons == [("a", "stop")]
        pair.emit(2)  # the engine ran a step past it
        pair.emit(1, request_id="b", finish="length")
        assert [o.new_token_ids for o in await take(other, 1)] == [[1]]
        pair.client.close()

    run(main())


@pytest.mark.parametrize("how", ["no encoding", "no pause", "no encoding of the last"])
def test_an_output_that_cannot_be_sent_ends_its_request_and_no_other(how: str) -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        a, b = await pair.client.submit(request("a")), await pair.client.submit(request("b"))
        tokens: list[Any] = [object()] if how.startswith("no encoding") else [1] * WINDOW
        if how == "no pause":
            pair.engine.pause = lambda request_id: 1 // 0  # type: ignore[method-assign, assignment]
        finish: Any = "length" if how == "no encoding of the last" else None
        pair.hub.dispatch([EngineOutput("b", [1]), EngineOutput("a", tokens, finish)])
        pair.hub.dispatch([EngineOutput("b", [2], "length")])
        (failed,) = await take(a, 1)
        assert failed.finish_reason == "error"
        assert failed.error is not None
        assert "could not be sent" in failed.error
        assert [output.new_token_ids for output in await take(b, 2)] == [[1], [2]]
        assert pair.engine.aborted == ([] if finish else ["a"])
        assert pair.hub.num_streams == 0
        pair.client.close()

    run(main())


def test_refusal_is_raised_as_it_is() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.port.refusal = InvalidRequestError("no such token", param="prompt")
        with pytest.raises(InvalidRequestError, match="no such token") as refused:
            await pair.client.submit(request())
        assert refused.value.param == "prompt"
        assert pair.client.num_streams == 0
        pair.client.close()

    run(main())


@pytest.mark.parametrize("how", ["gap", "end", "fatal"])
def test_broken_channel_tells_all_requests_at_once(how: str) -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        streams = [await pair.client.submit(request(name)) for name in "abc"]
        pair.emit(5)
        assert (await take(streams[0], 1))[0].new_token_ids == [5]
        if how == "gap":
            pair.port.drop_frames = {2}
            pair.emit(6)
            pair.emit(7)
        elif how == "end":
            next(iter(pair.hub.channels)).close()
        else:
            pair.hub.fail("worker 0 died")
        reason = {"gap": "frame 2 was lost", "end": "ended the channel", "fatal": "worker 0 died"}[how]
        for stream in streams:
            with pytest.raises(EngineDeadError, match=reason):
                await take(stream, 3)
        assert pair.lost == [3]
        assert pair.client.state == "closed"
        with pytest.raises(EngineDeadError):
            await pair.client.submit(request("d"))

    run(main())


def test_submit_under_way_fails_when_the_channel_breaks() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.port.hanging = True
        submit = asyncio.create_task(pair.client.submit(request()))
        await limits.async_pause(0.02)
        pair.client.close("the process is gone")
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(submit, limits.patience_s())

    run(main())


def test_silent_ingress_loses_its_requests() -> None:
    async def main() -> None:
        pair = Pair(limits.scaled_s(0.6))
        await pair.open()
        await pair.client.submit(request())
        await until(lambda: pair.port.num_controls >= 5, "renewals, by itself, for longer than a lease")
        assert pair.hub.expire() == []
        for task in pair.client._tasks:  # as if its process were gone, its connection still up
            task.cancel()
        # The cancelled stream may have dropped the channel already.
        await until(lambda: pair.hub.expire() == ["ingress"] or pair.engine.aborted, "the lease's end")
        assert pair.engine.aborted == ["a"]
        assert pair.hub.num_streams == 0

    run(main())


def test_silent_hub_channel_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NotingEngine()
    hub = ChannelHub(engine, WINDOW, 5.0)
    now = [100.0]
    monkeypatch.setattr(frame_queue, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def main() -> None:
        channel = hub.open("c", "ingress-1")
        hub.add("c", "0", "a")
        now[0] += 4.9
        assert hub.expire() == []
        now[0] += 0.2
        assert hub.expire() == ["ingress-1"]
        assert engine.aborted == ["a"]
        assert channel.closed

    run(main())


def test_drain_lets_requests_finish_and_then_closes() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        stream = await pair.client.submit(request())
        pair.client.drain()
        assert not pair.client.is_live
        with pytest.raises(EngineDeadError):
            await pair.client.submit(request("b"))
        await limits.async_pause(0.1)
        assert len(list(pair.hub.channels)) == 1
        pair.emit(1, finish="length")
        assert len(await take(stream, 1)) == 1
        stream.close()
        await until(lambda: pair.client.state == "closed")
        assert list(pair.hub.channels) == []
        assert pair.engine.aborted == []

    run(main())


def test_revived_channel_takes_requests_again() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        stream = await pair.client.submit(request())
        pair.client.drain()
        pair.client.revive()
        assert pair.client.is_live
        other = await pair.client.submit(request("b"))
        stream.close()
        other.close()
        await limits.async_pause(0.1)
        assert pair.client.is_live
        pair.client.close()

    run(main())


def test_reopening_replaces_the_old_channel() -> None:
    engine = NotingEngine()
    hub = ChannelHub(engine, WINDOW, 8.0)
    hub.open("one", "ingress")
    hub.add("one", "0", "a")
    hub.open("two", "ingress")
    assert engine.aborted == ["a"]
    with pytest.raises(EngineDeadError, match="one"):
        hub.add("one", "1", "b")


def test_frame_survives_the_wire() -> None:
    frame = Frame(3, [], LOAD, "why")
    assert decode_frame(encode(frame)) == frame


def test_abort_that_overtakes_its_request() -> None:
    engine = NotingEngine()
    hub = ChannelHub(engine, WINDOW, 8.0)
    hub.open("c", "ingress")
    hub.control(ControlMessage("c", [("5", "abort")], []))
    with pytest.raises(EngineDeadError, match="aborted before"):
        hub.add("c", "5", "a")
    hub.add("c", "6", "b")
    assert hub.num_streams == 1


def test_a_silent_replica_is_given_up_and_not_believed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a stopped process: frames stop, and come again after its requests have gone elsewhere."""
    monkeypatch.setattr(channel_client, "TURN_S", limits.scaled_s(0.05))

    async def main() -> None:
        pair = Pair()
        await pair.open()
        stream = await pair.client.submit(request())
        pair.emit(1)
        assert [output.new_token_ids for output in await take(stream, 1)] == [[1]]
        for _ in range(3 * channel_client.LOST_SILENT_TURNS):  # silent of tokens, but alive
            pair.hub.heartbeat(LOAD)
            await limits.async_pause(0.05)
        assert pair.client.is_live
        outputs = stream.outputs()
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await asyncio.wait_for(anext(outputs), limits.patience_s())
        assert pair.lost == [1]
        pair.emit(2)  # the replica goes on, late
        pair.hub.heartbeat(LOAD)
        await limits.async_pause(0.05)
        assert not pair.client.is_live
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await anext(stream.outputs())
        await until(lambda: pair.engine.aborted == ["a"], "nothing is computed for nobody")

    run(main())


def test_a_pause_of_this_process_is_no_silence_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_client, "TURN_S", 0.01)

    async def main() -> None:
        pair = Pair()
        await pair.open()
        limits.pause(0.2)  # nothing of this process runs, as if it had been stopped
        for _ in range(2):
            await asyncio.sleep(0)
        assert pair.client.is_live

    run(main())
