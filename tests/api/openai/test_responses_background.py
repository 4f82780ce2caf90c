"""Background responses through the real SDK: they outlive their client, are followed, cancelled, bounded, and fail with
their server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from app.api.openai import responses_background
from app.api.openai.response_store import ResponseStore
from app.api.openai.responses_background import BackgroundResponses
from app.api.server.app import create_app
from app.api.store.entries import Lease, StoreConflictError
from app.api.store.kinds import local_stores
from app.api.store.leased_entry import LeasedEntry
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from tests import limits
from tests.api.store.shaky import Nth, shaky_stores

TEXT = "The quick brown fox jumps over the lazy dog."
Wait = Callable[..., None]


@pytest.fixture
def say(client: Any, served_model: Any) -> None:
    client.script = lambda request: served_model.tokenizer.encode(TEXT, False)


def create(sdk: openai.OpenAI, **fields: Any) -> Any:
    return sdk.responses.create(**{"model": "m", "input": "hi", "background": True, **fields})


def ended(sdk: openai.OpenAI, response_id: str, wait_for: Wait) -> Any:
    wait_for(lambda: sdk.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return sdk.responses.retrieve(response_id)


def test_it_answers_later(sdk: openai.OpenAI, say: None, client: Any, wait_for: Wait) -> None:
    client.gate = asyncio.Event()
    response = create(sdk, metadata={"k": "v"})
    assert (response.status, response.background, response.output) == ("queued", True, [])
    assert sdk.responses.retrieve(response.id).status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match=r"is (queued|in_progress)"):
        sdk.responses.create(model="m", input="more", previous_response_id=response.id)
    client.open()
    done = ended(sdk, response.id, wait_for)
    assert (done.status, done.output_text, done.metadata) == ("completed", TEXT, {"k": "v"})
    assert done.usage.output_tokens > 5
    assert sdk.responses.cancel(response.id).status == "completed", "what has ended stays as it is"
    assert sdk.responses.create(model="m", input="more", previous_response_id=response.id).output_text == TEXT
    assert [item.type for item in sdk.responses.input_items.list(response.id)] == ["message"]


def test_a_stream_is_resumed(sdk: openai.OpenAI, say: None, client: Any, wait_for: Wait) -> None:
    client.gate, client.gate_after = asyncio.Event(), 4
    stream = create(sdk, stream=True)
    seen = []
    for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()  # the client leaves in the middle
    kinds = [event.type for event in seen]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    rest = sdk.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    seen.append(next(iter(rest)))  # it is followed while it runs
    client.open()
    seen += rest
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == TEXT
    ended(sdk, response_id, wait_for)
    again = list(sdk.responses.retrieve(response_id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in seen]
    assert list(sdk.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)) == []


def test_a_cancel(sdk: openai.OpenAI, say: None, client: Any, wait_for: Wait) -> None:
    client.gate, client.gate_after = asyncio.Event(), 3
    response = create(sdk)
    follower = sdk.responses.retrieve(response.id, stream=True)
    first = next(event for event in follower if event.type == "response.output_text.delta")
    cancelled = sdk.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert first.delta
    assert cancelled.output_text.startswith(first.delta)
    assert [event.type for event in follower][-1] == "response.cancelled"
    wait_for(lambda: client.num_running == 0)
    assert client.num_aborted == 1
    assert sdk.responses.retrieve(response.id).status == "cancelled"
    plain = sdk.responses.create(model="m", input="hi", extra_body={"max_output_tokens": 2})
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.retrieve(plain.id, stream=True)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.cancel("resp_none")


def test_one_that_is_deleted_or_fails_ends(sdk: openai.OpenAI, say: None, client: Any, wait_for: Wait) -> None:
    client.gate, client.gate_after = asyncio.Event(), 3
    response = create(sdk)
    sdk.responses.delete(response.id)
    client.open()
    wait_for(lambda: client.num_running == 0)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)
    client.fail_after = (2, RuntimeError("broken"))
    failed = ended(sdk, create(sdk).id, wait_for)
    assert (failed.status, failed.error.message) == ("failed", "internal server error")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(sdk, extra_body={"temperature": -1})


def test_two_ingress_replicas_and_bounds(
    client: Any, served_model: Any, make_client: Any, http_to: Any, say: None, wait_for: Wait
) -> None:
    config = IngressConfig(max_background_responses=3, max_tenant_background_responses=2, lease_s=limits.scaled_s(1.0))
    stores = local_stores(config)
    one = http_to(create_app(client, RequestLimits(), config, None, stores))
    two = http_to(create_app(make_client(served_model), RequestLimits(), config, None, stores))
    client.gate, client.gate_after = asyncio.Event(), 3
    body = {"input": "hi", "background": True}
    first, second = (one.post("/v1/responses", json=body).json()["id"] for _ in range(2))
    refused = one.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    wait_for(lambda: two.get(f"/v1/responses/{first}").json()["output"])
    assert two.post(f"/v1/responses/{first}/cancel").json()["status"] == "cancelled"
    wait_for(lambda: client.num_running == 1)  # the heartbeat finds out
    client.open()
    with two.stream("GET", f"/v1/responses/{second}", params={"stream": "true"}) as events:
        datas = [json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line.startswith("data: ")]
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    assert datas[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    asyncio.run(_lose(stores, first))


async def _lose(stores: Any, response_id: str) -> None:
    """A tenant's response is nobody else's."""
    assert await stores("responses").get("", response_id) is not None
    assert await stores("responses").get("other", response_id) is None


def test_a_response_whose_server_is_gone_has_failed(client: Any, http_to: Any, wait_for: Wait) -> None:
    config = IngressConfig()
    stores = local_stores(config)
    http: httpx.Client = http_to(create_app(client, RequestLimits(), config, None, stores))
    lost = {"id": "resp_lost", "status": "in_progress", "background": True, "previous_response_id": None}
    store = stores("responses")
    put = store.put(
        "", "resp_lost", json.dumps(lost).encode(), append=[b"[]", b"event: x\ndata: {}\n\n"], lease=Lease("gone", 0.0)
    )
    asyncio.run(put)
    response = http.get("/v1/responses/resp_lost").json()
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    text = http.get("/v1/responses/resp_lost", params={"stream": "true", "starting_after": 0}).text
    assert [line for line in text.splitlines() if line.startswith("event: ")] == ["event: response.failed"]


def test_too_many_events_keep_the_end(
    sdk: openai.OpenAI, say: None, monkeypatch: pytest.MonkeyPatch, wait_for: Wait
) -> None:
    monkeypatch.setattr("app.api.openai.responses_background.MAX_EVENT_BYTES", 2000)
    response = create(sdk)
    done = ended(sdk, response.id, wait_for)
    assert done.output_text == TEXT
    events = list(sdk.responses.retrieve(response.id, stream=True))
    assert events[-1].type == "response.completed"
    assert 2 < len(events) < 15
    assert [event.sequence_number for event in events] == list(range(len(events)))
    rest = list(sdk.responses.retrieve(response.id, stream=True, starting_after=len(events) - 2))
    assert [event.to_dict() for event in rest] == [events[-1].to_dict()]


def test_the_stream_of_one_that_is_deleted_ends(sdk: openai.OpenAI, say: None, client: Any) -> None:
    client.gate, client.gate_after = asyncio.Event(), 3
    follower = create(sdk, stream=True)
    seen = [next(follower) for _ in range(4)]
    sdk.responses.delete(seen[0].response.id)
    seen += follower
    assert (seen[-1].type, seen[-1].code) == ("error", "response_not_found")
    assert [event.sequence_number for event in seen] == list(range(len(seen)))


@pytest.mark.parametrize("fate", ["undone", "done"])
@pytest.mark.parametrize("method", ["put", "append"])
def test_a_call_of_the_store_that_fails_costs_nothing(
    client: Any, http_to: Any, say: None, wait_for: Wait, method: str, fate: Any
) -> None:
    """Neither a heartbeat nor an event nor the end, done or not, ends or doubles anything."""
    fails = Nth(2, fate, lambda kind, called: "done" if called == method else "")
    config = IngressConfig(lease_s=limits.scaled_s(0.5))
    http = http_to(create_app(client, RequestLimits(), config, None, shaky_stores(config, fails)))
    client.gate, client.gate_after = asyncio.Event(), 3
    response_id = http.post("/v1/responses", json={"input": "hi", "background": True}).json()["id"]
    wait_for(lambda: fails.num_calls > (3 if method == "put" else 0))
    client.open()
    wait_for(lambda: http.get(f"/v1/responses/{response_id}").json()["status"] not in ("queued", "in_progress"))
    assert http.get(f"/v1/responses/{response_id}").json()["status"] == "completed"
    text = http.get(f"/v1/responses/{response_id}", params={"stream": "true"}).text
    datas = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    assert "".join(data["delta"] for data in datas if data["type"].endswith("text.delta")) == TEXT


def test_events_that_overtake_a_cancel_have_numbers_of_their_own() -> None:
    """Another ingress cancels while the worker appends: the end comes after all that was kept."""

    async def go() -> None:
        store = shaky_stores(IngressConfig(), lambda kind, method: "")("responses")
        kept = ResponseStore(store, RequestLimits())
        response = {"id": "resp_r", "status": "in_progress", "previous_response_id": None, "background": True}
        await kept.keep("t", response, b"[]", [b"0", b"1"], lease=Lease("worker", 60.0))
        stored = await kept.find("t", "resp_r")
        await store.append("t", "resp_r", [b"2"], "worker")
        assert not await kept.end("t", stored, response | {"status": "cancelled"})
        await BackgroundResponses(kept, IngressConfig()).cancel("t", "resp_r")
        chunks = await store.read("t", "resp_r", 1)
        assert chunks is not None
        assert chunks[:-1] == [b"0", b"1", b"2"]
        assert b'"sequence_number": 3' in chunks[-1]

    asyncio.run(go())


def test_a_heartbeat_does_not_follow_the_last_write() -> None:
    async def go() -> None:
        store = shaky_stores(IngressConfig(), lambda kind, method: "")("responses")
        entry = LeasedEntry(store, "t", "r", Lease("me", 60.0))
        await entry.write(lambda: b"begun")
        writes = entry.write(lambda: b"ended", is_last=True), entry.write(lambda: b"under way")
        assert isinstance((await asyncio.gather(*writes, return_exceptions=True))[1], StoreConflictError)
        stored = await store.get("t", "r")
        assert stored is not None
        assert (stored.header, stored.owner) == (b"ended", "")

    asyncio.run(go())


def test_what_nobody_follows_is_kept_in_few_calls(
    client: Any, http_to: Any, say: None, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_background, "POLL_S", limits.patience_s())
    calls: Counter[str] = Counter()

    def count(kind: str, method: str) -> Any:
        calls[method] += 1
        return ""

    client.delay_s = 0.001  # between two tokens
    http = http_to(create_app(client, RequestLimits(), IngressConfig(), None, shaky_stores(IngressConfig(), count)))
    response_id = http.post("/v1/responses", json={"input": "hi", "background": True}).json()["id"]
    wait_for(lambda: calls["append"] == 1)
    wait_for(lambda: client.num_running == 0)
    assert calls["append"] == 1
    text = http.get(f"/v1/responses/{response_id}", params={"stream": "true"}).text  # who follows waits for nothing
    assert text.count("output_text.delta") > 10
    assert "response.completed" in text
    assert calls["append"] <= 3


def test_following_reads_no_headers(client: Any, http_to: Any, say: None) -> None:
    calls: Counter[str] = Counter()

    def count(kind: str, method: str) -> Any:
        calls[method] += 1
        return ""

    config = IngressConfig()
    http = http_to(create_app(client, RequestLimits(), config, None, shaky_stores(config, count)))
    body = {"input": "hi", "background": True, "stream": True}
    assert http.post("/v1/responses", json=body).text.count("output_text.delta") > 10
    assert calls["tail"] > 3
    assert calls["get"] == 0
