"""`Idempotency-Key` with the real SDKs: a request whose stream was cut comes again and gets the same answer, which was
computed once."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from app.api.http.auth import ANONYMOUS, ApiKey, ApiKeys
from app.api.idempotency import answer
from app.api.idempotency.kept_answers import AnswerStore
from app.api.idempotency.key import IdempotentRequest, fingerprint_of
from app.api.server.app import create_app
from app.api.store.kinds import Stores, local_stores
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import EngineDeadError
from tests import limits
from tests.api.store.shaky import Fate, Nth, shaky_stores

TEXT = "The quick brown fox jumps over the lazy dog."
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
Wait = Callable[..., None]
numbers = itertools.count()


@pytest.fixture(autouse=True)
def say(client: Any, served_model: Any) -> None:
    client.script = lambda request: served_model.tokenizer.encode(TEXT, False)


@pytest.fixture
def key() -> dict[str, str]:
    return {"Idempotency-Key": f"key {next(numbers)}"}


@pytest.fixture
def stores() -> Stores:
    return local_stores(IngressConfig())


@pytest.fixture
def replica(client: Any, http_to: Callable[[Any], httpx.Client], stores: Stores) -> Callable[..., httpx.Client]:
    """Another ingress replica of one application."""

    def start(own: Any = None, **options: Any) -> httpx.Client:
        ingress = IngressConfig(**options)
        return http_to(create_app(own or client, RequestLimits(), ingress, ApiKeys(), stores))

    return start


def chat_text(sdk: openai.OpenAI, key: dict[str, str], most: int | None = None) -> str:
    stream = sdk.chat.completions.create(**BODY, stream=True, extra_headers=key)  # type: ignore[call-overload]
    texts = [chunk.choices[0].delta.content or "" for chunk in itertools.islice(stream, most)]
    stream.close()
    return "".join(texts)


def response_text(sdk: openai.OpenAI, key: dict[str, str], most: int | None = None) -> str:
    stream = sdk.responses.create(model="m", input="hi", stream=True, extra_headers=key)
    events = list(itertools.islice(stream, most))
    stream.close()
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def message_text(sdk: openai.OpenAI, key: dict[str, str], most: int | None = None) -> str:
    base = str(sdk.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=limits.patience_s()) as claude:
        asked: Any = {"model": "m", "max_tokens": 100, "messages": BODY["messages"]}
        stream = claude.messages.create(**asked, stream=True, extra_headers=key)
        events = list(itertools.islice(stream, most))
        stream.close()
    return "".join(getattr(event.delta, "text", "") for event in events if event.type == "content_block_delta")


@pytest.mark.parametrize("read", [chat_text, response_text, message_text])
def test_a_cut_stream_is_read_again_from_its_start(
    read: Callable[..., str], sdk: openai.OpenAI, client: Any, key: dict[str, str]
) -> None:
    client.gate, client.gate_after = asyncio.Event(), 3
    assert TEXT.startswith(read(sdk, key, 3))
    threading.Timer(0.2, client.open).start()  # it joins what runs, and waits with it
    assert read(sdk, key) == TEXT
    assert read(sdk, key) == TEXT, "it has ended by now"
    assert len(client.requests) == 1


def test_an_answer_is_given_again(sdk: openai.OpenAI, client: Any, key: dict[str, str]) -> None:
    first = sdk.chat.completions.with_raw_response.create(**BODY, extra_headers=key)  # type: ignore[call-overload]
    again = sdk.chat.completions.with_raw_response.create(**BODY, extra_headers=key)  # type: ignore[call-overload]
    assert first.parse() == again.parse()
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-manta-replica"] == first.headers["x-manta-replica"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert len(client.requests) == 1
    sdk.chat.completions.create(**BODY)  # type: ignore[call-overload]
    assert len(client.requests) == 2, "without a key each is one of its own"


def test_many_at_once_run_once(http: httpx.Client, client: Any, key: dict[str, str], wait_for: Wait) -> None:
    client.gate = asyncio.Event()
    found: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: found.append(http.post(CHAT, json=BODY, headers=key))) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: client.requests)
    client.open()
    for thread in threads:
        thread.join()
    assert len({response.json()["id"] for response in found}) == 1
    assert len(client.requests) == 1


def test_the_key_of_another_request_is_refused(sdk: openai.OpenAI, client: Any, key: dict[str, str]) -> None:
    sdk.chat.completions.create(**BODY, extra_headers=key)  # type: ignore[call-overload]
    with pytest.raises(openai.UnprocessableEntityError) as error:
        sdk.chat.completions.create(**BODY, temperature=0, extra_headers=key)  # type: ignore[call-overload]
    assert (error.value.code, error.value.param) == ("idempotency_key_reused", "Idempotency-Key")
    with pytest.raises(openai.UnprocessableEntityError):
        sdk.completions.create(model="m", prompt="hi", extra_headers=key)
    assert len(client.requests) == 1


@pytest.mark.parametrize("value", ["", "x" * 256, "tab\there"])
def test_a_key_that_is_none(http: httpx.Client, value: str, client: Any) -> None:
    response = http.post(CHAT, json=BODY, headers=[("Idempotency-Key", value)])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Idempotency-Key")
    several = http.post(CHAT, json=BODY, headers=[("Idempotency-Key", "a"), ("idempotency-key", "b")])
    assert several.status_code == 400
    assert not client.requests


def test_tenants_have_keys_of_their_own(
    client: Any, http_to: Callable[[Any], httpx.Client], key: dict[str, str]
) -> None:
    keys = ApiKeys(ApiKey.parse(f"{name}={name}-secret", name) for name in ("one", "two"))
    http = http_to(create_app(client, RequestLimits(), keys=keys))
    ids = [
        http.post(CHAT, json=BODY, headers={**key, "authorization": f"Bearer {name}-secret"}).json()["id"]
        for name in ("one", "two", "one")
    ]
    assert ids[0] == ids[2] != ids[1]


def test_what_failed_runs_again(http: httpx.Client, client: Any, key: dict[str, str]) -> None:
    client.fail_after = (0, EngineDeadError("no replica"))
    assert http.post(CHAT, json=BODY, headers=key).status_code == 503
    client.fail_after = (3, EngineDeadError("the replica is gone"))
    streamed = {**BODY, "stream": True}
    key = {"Idempotency-Key": key["Idempotency-Key"] + " streamed"}
    assert "the replica is gone" in http.post(CHAT, json=streamed, headers=key).text
    client.fail_after = None
    assert "the replica is gone" not in http.post(CHAT, json=streamed, headers=key).text
    assert http.post(CHAT, json={**BODY, "n": 0}, headers={"Idempotency-Key": "wrong"}).status_code == 400
    assert http.post(CHAT, json=BODY, headers={"Idempotency-Key": "wrong"}).status_code == 200, "nothing ran under it"


def test_another_replica_follows_and_replays(
    replica: Callable[..., httpx.Client], client: Any, key: dict[str, str], wait_for: Wait
) -> None:
    here, there = replica(), replica()
    client.gate, client.gate_after = asyncio.Event(), 3
    streamed = {**BODY, "stream": True}
    with here.stream("POST", CHAT, json=streamed, headers=key) as response:
        next(response.iter_text())  # and its connection is cut
    with there.stream("POST", CHAT, json=streamed, headers=key) as response:
        texts: Iterator[str] = response.iter_text()
        begun = next(texts)
        client.open()
        followed = begun + "".join(texts)
    replayed = there.post(CHAT, json=streamed, headers=key)
    assert followed == replayed.text == here.post(CHAT, json=streamed, headers=key).text
    assert followed.endswith("data: [DONE]\n\n")
    assert replayed.headers["content-type"] == response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert len(client.requests) == 1


def test_a_lost_server_s_answer_is_made_anew_with_the_same_seed(
    replica: Callable[..., httpx.Client],
    http_to: Callable[[Any], httpx.Client],
    stores: Stores,
    make_client: Any,
    served_model: Any,
    key: dict[str, str],
) -> None:
    clients = [make_client(served_model), make_client(served_model)]
    first = http_to(create_app(clients[0], RequestLimits()))
    assert first.post(CHAT, json=BODY, headers=key).status_code == 200
    request = sent(key)

    async def begin_and_die() -> None:
        store = AnswerStore(stores("answers"), lease_s=0.01, kept_s=1.0, max_running=1)
        assert await store.begin(request, None) is not None

    asyncio.run(begin_and_die())
    answer = replica(clients[1]).post(CHAT, json=BODY, headers=key)
    assert answer.status_code == 200
    seeds = [client.requests[0].sampling.seed for client in clients]
    assert seeds[0] == seeds[1] == request.seed
    given = replica(clients[1]).post(CHAT, json={**BODY, "seed": 7}, headers={"Idempotency-Key": "given"})
    assert given.status_code == 200
    assert clients[1].requests[-1].sampling.seed == 7


def sent(key: dict[str, str]) -> IdempotentRequest:
    """The request of BODY under `key`."""
    body = httpx.Request("POST", "/", json=BODY).read()
    fingerprint = fingerprint_of({"path": CHAT, "query_string": b"", "headers": []}, body)
    return IdempotentRequest(ANONYMOUS, key["Idempotency-Key"], fingerprint)


def test_bounds(replica: Callable[..., httpx.Client], client: Any, key: dict[str, str], wait_for: Wait) -> None:
    http = replica(max_tenant_running_keys=1)
    client.gate = asyncio.Event()
    thread = threading.Thread(target=lambda: http.post(CHAT, json=BODY, headers=key))
    thread.start()
    wait_for(lambda: client.requests)
    refused = http.post(CHAT, json=BODY, headers={"Idempotency-Key": "another"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    client.open()
    thread.join()
    assert http.post(CHAT, json=BODY, headers={"Idempotency-Key": "another"}).status_code == 200


def test_a_long_answer_is_not_kept_but_whole(
    http: httpx.Client, client: Any, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "MAX_KEPT_BYTES", 500)
    monkeypatch.setattr(answer, "MAX_AHEAD_BYTES", 100)
    streamed = {**BODY, "stream": True}
    first, second = (http.post(CHAT, json=streamed, headers=key).text for _ in range(2))
    assert first.endswith("data: [DONE]\n\n")
    assert second.count("data:") == first.count("data:")
    assert len(client.requests) == 2
    assert client.requests[0].sampling.seed == client.requests[1].sampling.seed


def status(http: httpx.Client, key: dict[str, str]) -> int:
    """0 for an answer that does not end."""
    try:
        return http.post(CHAT, json={**BODY, "stream": True}, headers=key, timeout=limits.scaled_s(0.5)).status_code
    except httpx.HTTPError:
        return 0


def test_nothing_runs_beside_an_answer_that_is_too_long_to_be_kept(
    replica: Callable[..., httpx.Client],
    client: Any,
    key: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Wait,
) -> None:
    monkeypatch.setattr(answer, "MAX_KEPT_BYTES", 500)
    client.gate, client.gate_after = asyncio.Event(), 5
    here, there = replica(), replica()
    streamed = {**BODY, "stream": True}
    first: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: first.append(here.post(CHAT, json=streamed, headers=key)))
    thread.start()
    wait_for(lambda: client.requests)  # or one of those below might be the one that runs
    for http in (here, there):
        wait_for(lambda http=http: status(http, key) == 409)
    refused = there.post(CHAT, json=streamed, headers=key).json()["error"]
    assert (refused["code"], refused["param"]) == ("idempotency_key_in_use", "Idempotency-Key")
    assert here.post(CHAT, json=BODY, headers=key).status_code == 422
    assert len(client.requests) == 1
    client.open()
    thread.join()
    assert first[0].text.endswith("data: [DONE]\n\n")
    wait_for(lambda: there.post(CHAT, json=streamed, headers=key).status_code == 200)
    assert len(client.requests) == 2


def test_a_body_counts_until_its_run_has_ended(
    client: Any, http_to: Callable[[Any], httpx.Client], key: dict[str, str], wait_for: Wait
) -> None:
    """Its client has left long before."""
    http = http_to(create_app(client, RequestLimits(max_bodies_bytes=400_000)))
    client.gate = asyncio.Event()
    json_type = {"content-type": "application/json"}
    large: dict[str, Any] = {"content": json.dumps(BODY).encode() + b" " * 150_000, "headers": json_type}
    with pytest.raises(httpx.TimeoutException):
        http.post(CHAT, content=large["content"], headers=json_type | key, timeout=limits.scaled_s(0.5))
    wait_for(lambda: client.requests)
    refused = http.post(CHAT, **large)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    client.open()
    wait_for(lambda: http.post(CHAT, **large).status_code == 200)


def test_an_answer_is_forgotten_in_time(
    replica: Callable[..., httpx.Client], client: Any, key: dict[str, str], wait_for: Wait
) -> None:
    http = replica(idempotency_s=0.01)
    http.post(CHAT, json=BODY, headers=key)
    wait_for(lambda: http.post(CHAT, json={**BODY, "n": 2}, headers=key).status_code == 200)


@pytest.mark.parametrize("method", ["put", "append"])
@pytest.mark.parametrize("fate", ["undone", "done"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_call_to_the_store_that_is_lost(
    method: str, fate: Fate, n: int, client: Any, http_to: Callable[[Any], httpx.Client], key: dict[str, str]
) -> None:
    ingress = IngressConfig()
    fails = Nth(n, fate, lambda kind, called: "done" if called == method else "")
    http = http_to(create_app(client, RequestLimits(), ingress, None, shaky_stores(ingress, fails)))
    client.delay_s = 0.02
    streamed = {**BODY, "stream": True}
    first, again = (http.post(CHAT, json=streamed, headers=key).text for _ in range(2))
    assert first == again
    assert len(client.requests) == 1
