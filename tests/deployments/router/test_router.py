"""The Router deployment without Serve: answers, explanations and metrics over feeds in memory; /debug/route over it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from app.api.server.debug import debug_routes
from app.config.router import RouterConfig
from app.deployments.router import router as router_module
from app.deployments.router.question import Question
from app.deployments.router.router import Router
from app.deployments.routing.policies.base import Decision
from app.records.block_hash import hash_blocks, root_hash
from app.records.kv_events import KVEventLog
from app.telemetry.exposition import render
from app.telemetry.metrics_recorder import decode_snapshot
from tests.deployments.channel.test_feeds import BLOCK_SIZE, Cluster, Replica, hashes
from tests.limits import run, until

KEY = b"a secret for tests"


class Handles:
    """In the place of EngineHandles."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def ping(self, asker_id: str, timeout_s: float) -> Any:
        return await self._cluster._discover()

    def port(self, replica_id: str) -> Replica:
        return self._cluster.replicas[replica_id]


class BareRouter(Router):
    """One that is not stopped by the garbage collector."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def make(monkeypatch: pytest.MonkeyPatch, names: str, **options: Any) -> tuple[Router, Cluster]:
    cluster = Cluster(names, num_routers=0)
    monkeypatch.setattr(router_module, "EngineHandles", Handles)
    router = object.__new__(BareRouter)
    await router.__init__(RouterConfig(**options), {"m": cluster})  # type: ignore[misc]
    return router, cluster


def test_answers_explains_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        router, cluster = await make(monkeypatch, "abc")
        cluster.replicas["b"].store(1, 2, 3)
        pool = router._pools["m"]
        assert pool.book.index is not None
        await until(lambda: pool.num_feeds == 3 and pool.book.index.is_synced("b"), "all are heard")  # type: ignore[union-attr]
        question = Question("m", 70, 10, b"".join(hashes(1, 2, 3, 4)))
        told = await router.explain(question)
        assert (told.policy, told.replica_id, told.level, told.num_prompt_blocks) == ("prefix_aware", "b", "exact", 4)
        assert {r.replica_id: r.cached_tokens for r in told.replicas} == {"a": 0, "b": 3 * BLOCK_SIZE, "c": 0}
        costs = {r.replica_id: r.cost_s["total_s"] for r in told.replicas if r.cost_s is not None}
        assert costs["b"] < min(costs["a"], costs["c"])
        assert (await router.explain(question)) == told  # asking changes nothing
        decision, unknown = await router.route([question, question._replace(excluded=("a", "b", "c"))])
        assert isinstance(decision, Decision)
        assert unknown is None
        assert (decision.replica_id, decision.match) == ("b", (3, 0))
        text = render([decode_snapshot(await router.metrics_snapshot())])
        assert f'manta:router_feeds{{model_name="m",router="{router._router_id}"}} 3.0' in text
        await router.check_health()
        await Router.__del__(router)

    run(main())


def test_a_question_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(router_module.logger, "exception", lambda _, model: logged.append(model))

    async def main() -> None:
        router, _ = await make(monkeypatch, "a")
        await until(lambda: router._pools["m"].num_feeds == 1, "it is heard")
        good, bad = Question("m", 70, 10, b""), Question("nobody", 70, 10, b"")
        for _ in range(2):
            first, none, last = await router.route([good, bad, good])
            assert none is None
            assert isinstance(first, Decision)
            assert isinstance(last, Decision)
        assert logged == ["nobody"]
        await Router.__del__(router)

    run(main())


def test_others_have_their_turn_between_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        router, _ = await make(monkeypatch, "", policy="round_robin")
        answered: list[str] = []
        monkeypatch.setattr(router, "_answer", lambda question: answered.append(question.session))
        both = [[Question("m", 10, 10, b"", session) for _ in range(3)] for session in ("one", "other")]
        await asyncio.gather(*(router.route(questions) for questions in both))
        assert answered == ["one", "other"] * 3
        await Router.__del__(router)

    run(main())


def test_an_empty_router_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        router, _ = await make(monkeypatch, "", policy="round_robin")
        assert await router.route([Question("m", 10, 10, b"")]) == [None]
        told = await router.explain(Question("m", 10, 10, b""))
        assert (told.replica_id, told.replicas) == (None, [])
        await Router.__del__(router)

    run(main())


class Client:
    """What the debug route needs of the ingress."""

    def __init__(self, served: Any, router: Router) -> None:
        self.models = {"m": served}
        self._router = router

    async def explain_route(
        self, model: str, prompt_token_ids: list[int], root: bytes, max_tokens: int, session: str
    ) -> dict[str, Any]:
        parent = root_hash(KEY, model="weights", cache_root=root)
        data = b"".join(hash_blocks(KEY, parent, prompt_token_ids[:-1], BLOCK_SIZE))
        return (await self._router.explain(Question(model, len(prompt_token_ids), max_tokens, data, session))).as_json()


def test_debug_route_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt cached for one salt is not cached for another; bad bodies are named."""
    from app.api.generation.served_models import load_served_model
    from app.api.server.app import create_app
    from app.config.limits import RequestLimits
    from app.config.model import ModelConfig

    async def main() -> None:
        router, cluster = await make(monkeypatch, "ab")
        served = load_served_model(ModelConfig.model_validate({"name": "m", "engine": {"model": "tiny-chat"}}))
        client: Any = Client(served, router)
        app = create_app(client, RequestLimits())
        app.include_router(debug_routes(client, RequestLimits()))
        text = "a prompt that is long enough for a few blocks, " * 6
        token_ids = served.tokenizer.encode(text)
        blocks = hash_blocks(KEY, root_hash(KEY, model="weights"), token_ids, BLOCK_SIZE)
        log: KVEventLog = cluster.replicas["a"].log
        log.report_stored(b"", blocks)
        cluster.replicas["a"].hub.publish(cluster.replicas["a"].report(), force=False)
        index = router._pools["m"].book.index
        assert index is not None
        await until(lambda: index.num_blocks("a") == len(blocks), "the Router knows")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            told = (await http.post("/debug/route", json={"prompt": text})).json()
            assert told["replica_id"] == "a"
            assert {r["replica_id"]: r["device_blocks"] > 0 for r in told["replicas"]} == {"a": True, "b": False}
            salted = (await http.post("/debug/route", json={"prompt": text, "cache_salt": "x"})).json()
            assert [r["device_blocks"] for r in salted["replicas"]] == [0, 0]
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            assert (await http.post("/debug/route", json=chat)).status_code == 200
            for body, field in (
                ({"prompt": text, "max_tokens": 0}, "max_tokens"),
                ({"prompt": text, "messages": []}, "messages"),
                ({"prompt": text, "nonsense": 1}, "nonsense"),
                ({"prompt": text, "model": "nobody"}, "model"),
            ):
                refused = await http.post("/debug/route", json=body)
                assert refused.status_code in (400, 404)
                assert refused.json()["error"]["param"] == field
        await Router.__del__(router)

    run(main())
