"""What the Router is asked, and that one which does not answer is left alone for a while."""

from __future__ import annotations

import asyncio

import pytest

from app.deployments.ingress import router_client
from app.deployments.ingress.router_client import RouterClient
from app.deployments.router.prompt_hasher import PromptHasher
from app.deployments.router.question import Question
from app.deployments.routing.claim import Claim
from app.deployments.routing.policies.base import Decision
from app.records.block_hash import hash_blocks, root_hash
from app.records.bundle import bundled
from app.records.load_report import LoadReport
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from tests.limits import patience_s, run, until

KEY = b"a secret for tests"


class Router:
    """Notes what it is asked; says "b", or fails."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.fails = False

    async def remote(self, questions: list[Question]) -> list[Decision]:
        self.asked += questions
        if self.fails:
            raise RuntimeError("no Router")
        return [Decision("b") for _ in questions]


def request(*output: int) -> EngineRequest:
    params = SamplingParams(max_tokens=20, n=2, seed=0)
    placement = Placement(cache_root=b"tenant", session="mine")
    return EngineRequest("r", list(range(40)), params, placement=placement, output_token_ids=list(output))


def test_one_that_goes_on_asks_for_all_of_its_tokens() -> None:
    async def main() -> None:
        router = Router()
        client = RouterClient(router, PromptHasher(KEY), patience_s())
        load = LoadReport("m", "a", "1", True, 0, 0, 0, 64, 16, 0, model_revision="weights")
        assert await client.place("m", request(), load) == Decision("b")
        assert await client.place("m", request(*range(12)), load, ("a",)) == Decision("b")
        root = root_hash(KEY, model="weights", cache_root=b"tenant")
        known = [*range(40), *range(12)]
        assert router.asked == [
            Question("m", 40, 2 * 20, b"".join(hash_blocks(KEY, root, known[:39], 16)), "mine", "", 40),
            Question("m", 52, 2 * 8, b"".join(hash_blocks(KEY, root, known[:51], 16)), "mine", "", 52, ("a",)),
        ]

    run(main())


def test_of_a_bundle_the_first_prompt_says_what_is_cached() -> None:
    async def main() -> None:
        router = Router()
        client = RouterClient(router, PromptHasher(KEY), patience_s())
        load = LoadReport("m", "a", "1", True, 0, 0, 0, 64, 16, 0, model_revision="weights")
        both = [EngineRequest(str(i), list(range(i, i + 40)), PoolingParams(task="embed")) for i in range(2)]
        await client.place("m", bundled(both), load, claim=Claim())
        root = root_hash(KEY, model="weights", cache_root=b"")
        (asked,) = router.asked
        assert (asked.num_prompt_tokens, asked.num_hashed_tokens, asked.claim) == (80, 40, Claim(num_prompts=2))
        assert asked.block_hashes == b"".join(hash_blocks(KEY, root, list(range(39)), 16))

    run(main())


def test_a_router_that_fails_rests() -> None:
    async def main() -> None:
        router = Router()
        client = RouterClient(router, PromptHasher(KEY), patience_s())
        router.fails = True
        assert await client.place("m", request(), None) is None
        assert await client.place("m", request(), None) is None
        assert len(router.asked) == 1
        client._asleep_until -= router_client.REST_S
        assert await client.place("m", request(), None) is None
        assert len(router.asked) == 2

    run(main())


class LateRouter:
    """Answers once it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = self.num_left = 0

    async def remote(self, questions: list[Question]) -> list[Decision]:
        self.num_asked += 1
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        return [Decision("b") for _ in questions]


def test_a_late_answer_ends_the_rest_and_gives_the_next_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "REST_S", patience_s())

    async def main() -> None:
        router = LateRouter()
        client = RouterClient(router, PromptHasher(KEY), 0.01)
        both = await asyncio.gather(client.place("m", request(), None), client.place("m", request(), None))
        assert both == [None, None]
        assert client.is_silent
        router.may_answer.set()
        await until(lambda: not client.is_silent)
        assert client._limit.seconds > 0.01
        assert await client.place("m", request(), None) == Decision("b")

    run(main())


def test_an_answer_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "REST_S", 0.01)

    async def main() -> None:
        router = LateRouter()
        client = RouterClient(router, PromptHasher(KEY), 0.01)
        for number in (1, 2):
            assert await client.place("m", request(), None) is None
            await until(lambda number=number: router.num_left == number)
            await until(lambda: not client.is_silent)
            assert client._limit.seconds == 0.01  # who does not answer gets no more time
        assert router.num_asked == 2

    run(main())
