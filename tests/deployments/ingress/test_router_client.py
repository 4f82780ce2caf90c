"""What the Router is asked, and that one which does not answer is left alone for a while."""

from __future__ import annotations

from typing import Any

from app.deployments import router_client
from app.deployments.channel.wire import LoadReport
from app.deployments.router_client import RouterClient
from app.deployments.routing.policies.base import Decision
from app.deployments.routing.prompt_hasher import PromptHasher
from app.engine.kv_cache.block_hash import hash_blocks, root_hash
from app.engine.request import EngineRequest, Placement
from app.engine.sampling_params import SamplingParams
from tests.limits import patience_s, run

KEY = b"a secret for tests"


class Router:
    """Notes what it is asked; says "b", or fails."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.fails = False

    async def remote(self, *arguments: Any) -> Decision:
        self.asked.append(arguments)
        if self.fails:
            raise RuntimeError("no Router")
        return Decision("b")


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
            ("m", 40, 2 * 20, b"".join(hash_blocks(KEY, root, known[:39], 16)), "mine", "", (), None),
            ("m", 52, 2 * 8, b"".join(hash_blocks(KEY, root, known[:51], 16)), "mine", "", ("a",), None),
        ]

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
