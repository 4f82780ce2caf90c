"""How requests travel to a replica: those of one prompt together, nobody behind another prompt."""

from __future__ import annotations

import asyncio

import pytest

from app.deployments.channel import submitter
from app.deployments.channel.submitter import Submitter
from app.deployments.channel.wire import PixelsGoneError
from app.errors import EngineDeadError, InvalidRequestError, MantaError
from app.records.bundle import Bundle
from app.records.media import MediaAsk, MediaItem, media_of
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.limits import run, until


class Port:
    """A replica that answers when it is told to; it refuses odd stream ids."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.answers: list[asyncio.Future[None]] = []

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        self.calls.append([int(stream_id) for stream_id, _ in requests])
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]
        return [InvalidRequestError(f"odd {i}") if int(i) % 2 else None for i, _ in requests]


class Desk:
    """A submitter and requests for it."""

    def __init__(self) -> None:
        self.port = Port()
        self.submitter = Submitter(self.port, "c")
        self.prompt = [1, 2, 3]

    def send(self, *stream_ids: int, prompt: list[int] | None = None) -> list[asyncio.Task[MantaError | None]]:
        request = EngineRequest("a", self.prompt if prompt is None else prompt, SamplingParams())
        return [asyncio.create_task(self.submitter.submit(str(i), request)) for i in stream_ids]

    def pool(self, stream_id: int, num_tokens: int, *asks: object) -> asyncio.Task[MantaError | None]:
        request = EngineRequest("a", [1] * num_tokens, PoolingParams(task="embed"), asks=asks)
        return asyncio.create_task(self.submitter.submit(str(stream_id), request))

    async def called(self, num_calls: int) -> None:
        await until(lambda: len(self.port.calls) == num_calls)


def test_what_comes_during_a_call_is_the_next_one_and_each_gets_its_own_answer() -> None:
    async def main() -> None:
        desk = Desk()
        first = desk.send(0, 1)
        await desk.called(1)
        later = desk.send(2, 3, 4)
        other = desk.send(6, prompt=list(desk.prompt))  # equal, but not the same body's
        await desk.called(2)
        assert desk.port.calls == [[0, 1], [6]]
        desk.port.answers[1].set_result(None)
        assert await other[0] is None
        later[0].cancel()  # its client has left
        desk.port.answers[0].set_result(None)
        await desk.called(3)
        assert desk.port.calls[2] == [3, 4]
        desk.port.answers[2].set_result(None)
        answers = await asyncio.gather(*first, *later[1:])
        assert [answer and answer.message for answer in answers] == [None, "odd 1", "odd 3", None]
        again = desk.send(8)
        await desk.called(4)
        desk.port.answers[3].set_result(None)
        assert await again[0] is None

    run(main())


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_the_end_of_a_replica_is_the_answer_to_all_that_wait(how: str) -> None:
    async def main() -> None:
        desk = Desk()
        first = desk.send(0, 2)
        await desk.called(1)
        later = desk.send(4)
        await asyncio.sleep(0)
        if how == "closed":
            desk.submitter.close("the replica is gone")
        else:  # by Ray, as its actor is gone
            desk.port.answers[0].cancel()
        answers = await asyncio.gather(*first, *later, return_exceptions=True)
        assert [type(answer) for answer in answers] == [EngineDeadError] * 3
        assert len(desk.port.calls) == 1

    run(main())


def test_closed_before_the_call_has_begun() -> None:
    async def main() -> None:
        desk = Desk()
        waiting = desk.send(0)
        await asyncio.sleep(0)
        desk.submitter.close("the replica is gone")
        with pytest.raises(EngineDeadError, match="is gone"):
            await waiting[0]
        assert desk.port.calls == []

    run(main())


def test_prompts_of_pooling_models_travel_together_up_to_so_many_tokens() -> None:
    async def main() -> None:
        desk = Desk()
        first = desk.pool(0, 5)
        await desk.called(1)
        rest = [desk.pool(2 * i, submitter.MAX_CALL_TOKENS // 2) for i in range(1, 4)]
        rest.append(desk.pool(9, submitter.MAX_CALL_TOKENS + 1))
        other = desk.send(20)  # it has a call of its own
        await desk.called(2)
        for number, calls in enumerate(([[0], [20]], [[2, 4]], [[6]], [[9]])):
            await desk.called(2 + number)
            assert desk.port.calls[-len(calls) :] == calls
            for answer in desk.port.answers:
                if not answer.done():
                    answer.set_result(None)
        answers = await asyncio.gather(first, *rest, *other)
        assert [answer and answer.message for answer in answers] == [None] * 4 + ["odd 9", None]

    run(main())


@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_call_that_fails_is_the_answer_to_those_that_were_in_it(is_pooled: bool) -> None:
    """The others have not been sent: what one call ended with says nothing of theirs."""

    async def main() -> None:
        desk = Desk()

        def send(*stream_ids: int) -> list[asyncio.Task[MantaError | None]]:
            return [desk.pool(i, 5) for i in stream_ids] if is_pooled else desk.send(*stream_ids)

        first = send(0, 2)
        await desk.called(1)
        later = send(4, 5)
        await until(lambda: sum(map(len, desk.submitter._waiting.values())) == 2)
        desk.port.answers[0].set_exception(EngineDeadError("no answer"))
        await desk.called(2)
        assert desk.port.calls == [[0, 2], [4, 5]]
        desk.port.answers[1].set_result(None)
        answers = await asyncio.gather(*first, *later, return_exceptions=True)
        assert [type(answer) for answer in answers] == [EngineDeadError] * 2 + [type(None), InvalidRequestError]
        assert not desk.submitter._waiting
        again = send(6)
        await desk.called(3)
        desk.port.answers[2].set_exception(EngineDeadError("no answer"))
        with pytest.raises(EngineDeadError):
            await again[0]
        assert not desk.submitter._waiting

    run(main())


def test_what_brings_a_picture_to_a_pooling_model_goes_alone() -> None:
    """Its one token says nothing of its pixels, of which a message takes only so many."""

    async def main() -> None:
        desk = Desk()
        waiting = [desk.pool(2 * i, 1, MediaAsk(())) for i in range(3)]
        waiting += [desk.pool(6, 5, Bundle((2, 3), (None, None))), desk.pool(8, 5)]
        await desk.called(4)
        assert sorted(desk.port.calls) == [[0], [2], [4], [6, 8]]
        for answer in desk.port.answers:
            answer.set_result(None)
        assert await asyncio.gather(*waiting) == [None] * 5

    run(main())


class Forgetful:
    """A replica that has each other request's pixels no more where they did not come with it."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, bytes]]] = []

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        asks = [media_of(request.asks) for _, request in requests]
        call = [(stream, ask.items[0].pixels) for (stream, _), ask in zip(requests, asks, strict=True) if ask]
        self.calls.append(call)
        return [None if pixels or int(stream) % 2 else PixelsGoneError("gone") for stream, pixels in call]


def test_pixels_are_sent_once_and_again_where_the_replica_has_them_no_more() -> None:
    item = MediaItem("image", b"d" * 16, 0, 1, (1, 1, 1), (4,), b"four")
    shows = EngineRequest("a", [1], SamplingParams(), asks=(MediaAsk((item,)),))

    async def main() -> None:
        port = Forgetful()
        desk = Submitter(port, "c", kept_bytes=4)

        async def send(*stream_ids: str) -> None:
            assert await asyncio.gather(*(desk.submit(one, shows) for one in stream_ids)) == [None] * len(stream_ids)

        for stream_ids in ["1"], ["3"], ["4", "5", "6"], ["7"]:
            await send(*stream_ids)
        assert port.calls == [
            [("1", b"four")],
            [("3", b"")],
            [("4", b""), ("5", b""), ("6", b"")],
            [("4", b"four"), ("6", b"four")],
            [("7", b"")],
        ]
        nothing_is_kept = Submitter(port, "c")
        port.calls.clear()
        for stream_id in "1", "3":
            assert await nothing_is_kept.submit(stream_id, shows) is None
        assert port.calls == [[("1", b"four")], [("3", b"four")]]

    run(main())


class SlowlyForgetful(Forgetful):
    """One that answers the first of its calls when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        refusals = await super().submit(channel_id, requests)
        await self.may_answer.wait()
        return refusals


def test_a_request_whose_client_has_left_is_not_sent_again_with_its_pixels() -> None:
    """Its abort has reached the replica by then: what is sent behind that would run for nobody."""
    item = MediaItem("image", b"d" * 16, 0, 1, (1, 1, 1), (4,), b"four")
    shows = EngineRequest("a", [1], SamplingParams(), asks=(MediaAsk((item,)),))

    async def main() -> None:
        port = SlowlyForgetful()
        desk = Submitter(port, "c", kept_bytes=4)
        port.may_answer.set()
        assert await desk.submit("1", shows) is None
        port.may_answer.clear()
        left, stays = (asyncio.create_task(desk.submit(stream_id, shows)) for stream_id in ("2", "4"))
        alone = EngineRequest("b", [1], SamplingParams(), asks=shows.asks)
        also_left = asyncio.create_task(desk.submit("6", alone))
        await until(lambda: len(port.calls) == 3)
        left.cancel()
        also_left.cancel()
        await asyncio.wait({left, also_left})
        port.may_answer.set()
        assert await stays is None
        await until(lambda: not desk._calls)
        assert [call for call in port.calls if ("4", b"four") in call] == [[("4", b"four")]]
        assert not any(pixels and stream in "26" for call in port.calls for stream, pixels in call)

    run(main())
