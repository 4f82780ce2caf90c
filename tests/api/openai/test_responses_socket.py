"""The websocket mode of /v1/responses as the openai SDK and its agents library see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponsesServerEvent

from app.api.http.held_bytes import HeldBytes
from app.api.http.sockets import SocketState
from app.api.openai.responses_socket import MAX_STREAMS, RecentResponses, ResponseCreate
from app.config.limits import RequestLimits

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponsesServerEvent)
ENDS = ("error", "response.completed", "response.incomplete", "response.failed")


def answer(connection: Any, **fields: Any) -> Any:
    """The last event of the answer to one message."""
    connection.response.create(**{"model": "m", "input": "hi", **fields})
    return rest(connection)


def rest(connection: Any) -> Any:
    for event in connection:
        if event.type in ENDS:
            return event
    raise AssertionError("the socket was closed")


@pytest.fixture
def prompt_of(client: Any, served_model: Any) -> Callable[[], str]:
    return lambda: str(served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False))


def test_an_answer(sdk: openai.OpenAI, client: Any, served_model: Any) -> None:
    client.script = lambda request: served_model.tokenizer.encode("The quick brown fox.", False)
    with sdk.responses.connect() as connection:
        connection.response.create(model="m", input="hi", instructions="Be brief.", metadata={"k": "v"})
        events = []
        while not events or json.loads(events[-1])["type"] not in ENDS:
            events.append(connection.recv_bytes())
    typed = [EVENT.validate_json(event) for event in events]
    assert [event.sequence_number for event in typed] == list(range(len(typed)))
    response = typed[-1].response
    assert response.output_text == "The quick brown fox."
    assert (response.status, response.metadata, response.instructions) == ("completed", {"k": "v"}, "Be brief.")
    assert sdk.responses.retrieve(response.id).output_text == response.output_text  # it was kept


def test_what_is_not_kept_is_continued_on_its_socket(sdk: openai.OpenAI, prompt_of: Any) -> None:
    with sdk.responses.connect() as connection, sdk.responses.connect() as other:
        last = answer(connection, input="one", store=False).response
        assert last.store is False
        for said in ("two", "three"):
            last = answer(connection, input=said, store=False, previous_response_id=last.id).response
        prompt = prompt_of()
        assert [prompt.count(f"user\n{said}<") for said in ("one", "two", "three")] == [1, 1, 1]
        refused = answer(other, previous_response_id=last.id)
        assert (refused.type, refused.code) == ("error", "previous_response_not_found")
        with pytest.raises(openai.BadRequestError, match="not kept"):
            sdk.responses.create(model="m", input="hi", previous_response_id=last.id)


def test_kept_and_unkept_responses_follow_each_other(sdk: openai.OpenAI, prompt_of: Any) -> None:
    first = sdk.responses.create(model="m", input="one")
    with sdk.responses.connect() as connection:
        second = answer(connection, input="two", store=False, previous_response_id=first.id).response
        third = answer(connection, input="three", previous_response_id=second.id).response
    prompt = prompt_of()
    assert [prompt.count(f"user\n{said}<") for said in ("one", "two", "three")] == [1, 1, 1]
    # The store has the third, but not the second that it continues.
    with pytest.raises(openai.BadRequestError) as error:
        sdk.responses.create(model="m", input="four", previous_response_id=third.id)
    assert error.value.code == "previous_response_not_found"


def test_an_older_response_of_the_socket_is_forgotten(sdk: openai.OpenAI) -> None:
    with sdk.responses.connect() as connection:
        first = answer(connection, store=False).response
        answer(connection, store=False)
        assert answer(connection, previous_response_id=first.id).code == "previous_response_not_found"


def test_a_conversation_is_prepared_without_an_answer(sdk: openai.OpenAI, client: Any, prompt_of: Any) -> None:
    with sdk.responses.connect() as connection:
        connection.send_raw(json.dumps({"type": "response.create", "model": "m", "input": "one", "generate": False}))
        ready = rest(connection).response
        assert (ready.status, ready.output, len(client.requests)) == ("completed", [], 0)
        answer(connection, input="two", store=False, previous_response_id=ready.id)
    prompt = prompt_of()
    assert prompt.count("user\none<") == prompt.count("user\ntwo<") == 1


def test_streams_are_echoed_and_remembered(sdk: openai.OpenAI) -> None:
    with sdk.responses.connect() as connection:

        def say(stream: str, **fields: Any) -> list[dict[str, Any]]:
            message = {"type": "response.create", "model": "m", "input": "hi", "store": False, "stream_id": stream}
            connection.send_raw(json.dumps(message | fields))
            events: list[dict[str, Any]] = []
            while not events or events[-1]["type"] not in ENDS:
                events.append(json.loads(connection.recv_bytes()))
            assert {event["stream_id"] for event in events} == {stream}
            return events

        first, _ = say("a")[-1]["response"], say("b")
        assert say("a", previous_response_id=first["id"])[-1]["type"] == "response.completed"
        assert say('"é', model="unknown")[-1]["status"] == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"background": True}, "background"), ({"stream": False}, "stream"), ({"stream_id": ""}, "stream_id")],
)
def test_what_a_message_may_not_ask(sdk: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with sdk.responses.connect() as connection:
        connection.send_raw(json.dumps({"type": "response.create", "model": "m", "input": "hi", **fields}))
        refused = rest(connection)
        assert (refused.type, refused.param) == ("error", param)


def test_tools_over_the_agents_library(server: Any, client: Any, served_model: Any) -> None:
    import agents

    agents.set_tracing_disabled(True)
    encode = served_model.tokenizer.encode
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    client.script = lambda request: encode("It is 3." if len(client.requests) % 2 == 0 else call, False)
    asked = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        asked.append((a, b))
        return str(a + b)

    async def main() -> list[Any]:
        sdk = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        model = agents.OpenAIResponsesWSModel("m", sdk)
        agent: Any = agents.Agent("A", model=model, tools=[add])
        whole = await agents.Runner.run(agent, "1 + 2?")
        streamed = agents.Runner.run_streamed(agent, "1 + 2?")
        async for _ in streamed.stream_events():
            pass
        await model.close()
        await sdk.close()
        return [whole.final_output, streamed.final_output]

    assert asyncio.run(main()) == ["It is 3."] * 2
    assert asked == [(1, 2)] * 2


def test_a_message_has_the_fields_of_a_body() -> None:
    body = ResponseCreate.model_validate({"type": "response.create", "input": "hi"})
    assert (body.stream, body.generates, body.stream_id) == (True, True, None)


def test_what_is_remembered_is_bounded_and_given_back() -> None:
    held = HeldBytes(1000)
    recent = RecentResponses(SocketState(held, RequestLimits(max_body_bytes=300).max_body_bytes))

    def keep(stream: str, response_id: str, size: int = 20) -> None:
        asyncio.run(recent.keeper(stream)("alice", {"id": response_id}, b"x" * size))  # type: ignore[arg-type]

    for i in range(MAX_STREAMS + 1):
        keep(str(i), f"resp_{i}")
    assert recent.parts("resp_0") is None
    assert recent.parts(f"resp_{MAX_STREAMS}") == (b"x" * 20, json.dumps({"id": f"resp_{MAX_STREAMS}"}).encode())
    total = held.total
    keep("1", "resp_a", size=301)  # longer than one body may be
    assert recent.parts("resp_a") is None
    assert held.total < total
    recent.clear()
    keep("1", "resp_b", size=250)
    keep("2", "resp_c", size=250)  # more than a tenant's half
    assert (recent.parts("resp_b") is not None, recent.parts("resp_c")) == (True, None)
    recent.clear()
    assert held.total == 0
