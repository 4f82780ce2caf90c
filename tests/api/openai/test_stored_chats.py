"""Chat completions that are kept, as the openai SDK sees them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from app.api.openai import chat_store
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import OverloadedError
from tests.api.store.shaky import shaky_stores

HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PATH = "/v1/chat/completions"


def say(client: Any, text: str) -> None:
    client.script = lambda request: client.models["m"].tokenizer.encode(text, False)


def ask(sdk: openai.OpenAI, **fields: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "m", "messages": HI, "store": True, **fields})


def test_what_was_answered_is_found(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "Hello.")
    made = ask(sdk, metadata={"k": "v"}, temperature=0.5, seed=3, logprobs=True, n=2, max_tokens=5)
    assert made.store is True
    found = sdk.chat.completions.retrieve(made.id)
    assert isinstance(found, openai.types.chat.ChatCompletion)
    hidden = {"store", "metadata"}
    theirs = {name: value for name, value in made.to_dict().items() if name not in hidden}
    assert found.to_dict().items() >= theirs.items()
    told = found.to_dict()
    assert (told["metadata"], told["temperature"], told["seed"]) == ({"k": "v"}, 0.5, 3)
    listed = sdk.chat.completions.messages.list(made.id)
    assert [(message.id, message.role, message.content) for message in listed] == [
        (f"{made.id}-0", "system", "Be brief."),
        (f"{made.id}-1", "user", "hi"),
    ]
    assert [part.text for part in listed.data[1].content_parts or ()] == ["hi"]  # type: ignore[union-attr]
    assert [message.content for message in sdk.chat.completions.messages.list(made.id, order="desc", limit=1)] == [
        "hi",
        "Be brief.",
    ]


@pytest.mark.parametrize("text", ["The quick brown fox 🙂.", f"Let me add.\n{CALL}", f"{CALL}{CALL}", ""])
@pytest.mark.parametrize("step", [1, 100])
def test_a_stream_is_kept_as_it_was_told(sdk: openai.OpenAI, client: Any, text: str, step: int) -> None:
    say(client, text)
    client.step = step
    state: Any = ChatCompletionStreamState()
    kept: list[Any] = []
    for chunk in ask(sdk, tools=[ADD], stream=True, stream_options={"include_usage": True}, logprobs=True):
        state.handle_chunk(chunk)
        last = chunk
        kept = [*kept, (chunk.choices[0].finish_reason, chunk.store)] if hasattr(chunk, "store") else kept
    assert len(kept) == 1
    assert kept[0][0] is not None
    assert kept[0][1] is True
    told, found = state.get_final_completion(), sdk.chat.completions.retrieve(last.id)
    (ours,), (theirs,) = found.choices, told.choices
    assert (ours.message.content or "") == (theirs.message.content or "")
    assert [call.to_dict() for call in ours.message.tool_calls or ()] == [
        {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}
        for call in theirs.message.tool_calls or ()
    ]
    assert len(ours.message.tool_calls or ()) == text.count("<tool_call>")
    assert ours.finish_reason == theirs.finish_reason
    assert ours.logprobs is not None
    assert ours.logprobs.content == theirs.logprobs.content
    assert found.usage == told.usage


def test_lists_are_pages_and_filters(sdk: openai.OpenAI, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    say(client, "yes")
    ids = [ask(sdk, model="m" if i % 2 else "alias", metadata={"i": str(i), "half": str(i // 3)}).id for i in range(6)]
    sdk.chat.completions.create(model="m", messages=HI)
    sdk.responses.create(model="m", input="hi")

    def listed(**query: Any) -> list[str]:
        return [one.id for one in sdk.chat.completions.list(**query)]

    for scan in (256, 2):
        monkeypatch.setattr(chat_store, "SCAN", scan)
        assert listed() == listed(limit=4) == ids
        assert listed(order="desc", limit=1) == ids[::-1]
        assert listed(model="alias", limit=2) == ids[::2]
        assert listed(metadata={"half": "1"}) == ids[3:]
        assert listed(metadata={"half": "1", "i": "4"}, model="alias") == [ids[4]]
        assert listed(metadata={"other": "1"}) == listed(model="none") == []
        assert listed(after=ids[3]) == ids[4:]
        first = sdk.chat.completions.list(limit=2)
        assert first.has_more
        assert (first.to_dict()["first_id"], first.to_dict()["last_id"]) == (ids[0], ids[1])


def test_metadata_change_and_completions_go(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "yes")
    made = ask(sdk, metadata={"k": "v"})
    changed: Any = sdk.chat.completions.update(made.id, metadata={"a": "b"})
    assert changed.metadata == {"a": "b"}
    assert changed.choices[0].message.content == "yes"
    assert [one.id for one in sdk.chat.completions.list(metadata={"a": "b"})] == [made.id]
    assert sdk.chat.completions.list(metadata={"k": "v"}).data == []
    cleared: Any = sdk.chat.completions.update(made.id, metadata=None)
    assert cleared.metadata == {}
    gone = sdk.chat.completions.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "chat.completion.deleted")
    calls: list[Any] = [
        lambda: sdk.chat.completions.retrieve(made.id),
        lambda: sdk.chat.completions.delete(made.id),
        lambda: sdk.chat.completions.update(made.id, metadata={}),
        lambda: sdk.chat.completions.messages.list(made.id),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="no chat completion is kept"):
            call()


def test_responses_beside_them_are_not_theirs(sdk: openai.OpenAI, http: httpx.Client, client: Any) -> None:
    say(client, "yes")
    made, response = ask(sdk), sdk.responses.create(model="m", input="hi")
    for path in (f"{PATH}/{response.id}", f"{PATH}/{response.id}/messages", f"/v1/responses/{made.id}"):
        assert http.get(path).status_code == 404
    assert http.delete(f"{PATH}/{response.id}").status_code == 404
    assert http.delete(f"/v1/responses/{made.id}").status_code == 404
    refused = http.post("/v1/responses", json={"input": "hi", "previous_response_id": made.id})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    refused = http.get(PATH, params={"after": response.id})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    assert sdk.chat.completions.retrieve(made.id).id == made.id
    assert http.post(f"{PATH}/render", json={"messages": HI}).status_code == 200, "it is no id"


@pytest.mark.parametrize(
    ("method", "path", "fields", "param"),
    [
        ("GET", "?limit=0", None, "limit"),
        ("GET", "?limit=101", None, "limit"),
        ("GET", "?order=up", None, "order"),
        ("GET", "?after=chatcmpl-1", None, "after"),
        ("GET", "?metadata=x", None, "metadata"),
        ("GET", "?metadata[]=x", None, "metadata"),
        ("GET", "?metadata[a=x", None, "metadata"),
        ("GET", f"?metadata[{'a' * 65}]=x", None, "metadata"),
        ("GET", "?" + "&".join(f"metadata[{i}]=x" for i in range(17)), None, "metadata"),
        ("POST", "/ID", {}, "metadata"),
        ("POST", "/ID", {"metadata": {"a": 1}}, "metadata.a"),
        ("POST", "/ID", {"metadata": {"a": "x" * 513}}, "metadata.a"),
        ("POST", "/ID", {"metadata": {}, "model": "m"}, "model"),
        ("GET", "/ID/messages?after=x", None, "after"),
        ("POST", "/batch", {"messages": [HI], "store": True}, "store"),
    ],
)
def test_refusals_name_the_field(
    http: httpx.Client, client: Any, method: str, path: str, fields: dict[str, Any] | None, param: str
) -> None:
    say(client, "yes")
    made = http.post(PATH, json={"messages": HI, "store": True}).json()
    refused = http.request(method, PATH + path.replace("ID", made["id"]), json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_tenants_see_their_own(client: Any) -> None:
    say(client, "yes")
    hashes = [f"{name}=sha256:{hashlib.sha256(f'key-of-{name}'.encode()).hexdigest()}" for name in ("alice", "bob")]

    async def talk() -> None:
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(client, RequestLimits(), IngressConfig(api_key_hashes=hashes)))
        )
        alice, bob = (
            openai.AsyncOpenAI(api_key=f"key-of-{name}", base_url="http://test/v1", http_client=http)
            for name in ("alice", "bob")
        )
        made = await alice.chat.completions.create(model="m", messages=HI, store=True)
        assert [one.id async for one in alice.chat.completions.list()] == [made.id]
        assert [one.id async for one in bob.chat.completions.list()] == []
        for call in (bob.chat.completions.retrieve, bob.chat.completions.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        with pytest.raises(openai.NotFoundError):
            await bob.chat.completions.update(made.id, metadata={})
        assert (await alice.chat.completions.retrieve(made.id)).id == made.id

    asyncio.run(talk())


def test_they_have_the_bounds_of_kept_responses(client: Any, http_to: Any) -> None:
    say(client, "yes")
    http = http_to(create_app(client, RequestLimits(), IngressConfig(max_stored_responses=2)))
    ids = [http.post(PATH, json={"messages": HI, "store": True}).json()["id"] for _ in range(2)]
    http.post("/v1/responses", json={"input": "hi"})
    assert [http.get(f"{PATH}/{one}").status_code for one in ids] == [404, 200]
    none = http_to(create_app(client, RequestLimits(), IngressConfig(max_stored_responses=0)))
    assert none.post(PATH, json={"messages": HI, "store": True}).json()["store"] is False
    assert none.get(PATH).json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_a_list_ends_before_it_is_too_large(client: Any, http_to: Any) -> None:
    say(client, "yes")
    http = http_to(create_app(client, RequestLimits(max_body_bytes=1500)))
    ids = [http.post(PATH, json={"messages": HI, "store": True}).json()["id"] for _ in range(5)]
    page = http.get(PATH).json()
    assert [one["id"] for one in page["data"]] == ids[: len(page["data"])]
    assert 0 < len(page["data"]) < 5
    assert page["has_more"]


@pytest.mark.parametrize("fate", ["undone", "done"])
def test_an_answer_that_the_store_did_not_take_says_so(client: Any, http_to: Any, fate: Any) -> None:
    say(client, "yes")
    stores = shaky_stores(IngressConfig(), lambda kind, method: fate if method == "put" else "")
    http = http_to(create_app(client, RequestLimits(), IngressConfig(), None, stores))
    body = {"messages": HI, "store": True}
    whole = http.post(PATH, json=body)
    assert (whole.status_code, whole.json()["store"]) == (200, False)
    assert whole.json()["choices"][0]["message"]["content"] == "yes"
    for shown in ({}, {"stream_options": {"include_usage": True}}):
        chunks = streamed(http, {**body, **shown})
        assert told(chunks) == [("stop", False)]
        assert [chunk["choices"] for chunk in chunks].count([]) == len(shown)


def streamed(http: httpx.Client, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream that ends as one should."""
    *chunks, done = http.post(PATH, json={**body, "stream": True}).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def told(chunks: list[Any]) -> list[Any]:
    """The chunks that say whether the chat is kept: the finish reason in each, and what it says."""
    return [(chunk["choices"][0]["finish_reason"], chunk["store"]) for chunk in chunks if "store" in chunk]


def test_a_stream_of_several_choices_says_it_with_the_last_finish(http: httpx.Client, client: Any) -> None:
    say(client, "yes")
    chunks = streamed(http, {"messages": HI, "store": True, "n": 3})
    assert told(chunks) == [("stop", True)]
    assert "store" in chunks[-1]
    finished = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


def test_no_thread_to_write_it_costs_the_answer_nothing(
    client: Any, http_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(client, "yes")
    app = create_app(client, RequestLimits())
    monkeypatch.setattr(chat_store, "writing_cost_s", lambda _: 1.0)

    def refuse(*_: Any) -> Any:
        raise OverloadedError("too much waits")

    monkeypatch.setattr(app.state.work_pool, "submit", refuse)
    chunks = streamed(http_to(app), {"messages": HI, "store": True})
    assert told(chunks) == [("stop", False)]
    assert http_to(app).get(PATH).json()["data"] == []


def test_what_nobody_asks_to_keep_is_not_kept(http: httpx.Client, client: Any) -> None:
    say(client, "yes")
    for body in ({}, {"store": False}, {"metadata": {"k": "v"}}, {"stream": True}):
        answer = http.post(PATH, json={"messages": HI, **body})
        assert '"store"' not in answer.text
    assert http.get(PATH).json()["data"] == []
