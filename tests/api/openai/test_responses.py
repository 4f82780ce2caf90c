"""/v1/responses as the openai SDK sees it: shapes, events, tools, kept conversations."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from app.api.openai import responses_opening
from app.api.openai.responses_conversion import to_chat
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from tests.api.store.shaky import shaky_stores

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
Say = Callable[[str], None]
PromptOf = Callable[[], str]


@pytest.fixture
def say(client: Any, served_model: Any) -> Say:
    def script(text: str) -> None:
        client.script = lambda request: served_model.tokenizer.encode(text, False)

    return script


@pytest.fixture
def prompt_of(client: Any, served_model: Any) -> PromptOf:
    return lambda: str(served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False))


def ask(sdk: openai.OpenAI, **fields: Any) -> Any:
    return sdk.responses.create(**{"model": "m", "input": "hi", **fields})


def test_an_answer(sdk: openai.OpenAI, say: Say, prompt_of: PromptOf) -> None:
    say("The quick brown fox.")
    response = ask(sdk, instructions="Be brief.", metadata={"k": "v"}, max_output_tokens=50)
    assert response.output_text == "The quick brown fox."
    assert (response.status, response.object, response.model) == ("completed", "response", "m")
    assert response.id.startswith("resp_")
    assert response.output[0].id.startswith("msg_")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.metadata, response.max_output_tokens, response.instructions) == ({"k": "v"}, 50, "Be brief.")
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in prompt_of()


def test_a_cut_answer_is_incomplete(sdk: openai.OpenAI, say: Say) -> None:
    say("The quick brown fox.")
    response = ask(sdk, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert [event.type for event in ask(sdk, max_output_tokens=2, stream=True)][-1] == "response.incomplete"


def test_the_events_pair_and_count(http: httpx.Client, say: Say) -> None:
    say(f"Let me add. {CALL}")
    body = {"model": "m", "input": "hi", "tools": [ADD], "stream": True}
    blocks = [block.split("\n") for block in http.post("/v1/responses", json=body).text.strip().split("\n\n")]
    datas = [json.loads(lines[1].removeprefix("data: ")) for lines in blocks]
    assert [lines[0].removeprefix("event: ") for lines in blocks] == [data["type"] for data in datas]
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    for data in datas:
        EVENT.validate_python(data)  # the SDK's own types
    kinds = [data["type"].removeprefix("response.") for data in datas]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = [data["item"] for data in datas if data["type"] == "response.output_item.done"]
    assert done == datas[-1]["response"]["output"]
    added = [data["item"]["id"] for data in datas if data["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]


@pytest.mark.parametrize("text", ["The quick brown fox 🙂.", f"Let me add.\n{CALL}", f"{CALL}{CALL}", ""])
def test_streamed_equals_collected(sdk: openai.OpenAI, say: Say, text: str) -> None:
    say(text)
    whole = ask(sdk, tools=[ADD])
    with sdk.responses.stream(model="m", input="hi", tools=[ADD]) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()

    def seen(response: Any) -> Any:
        hidden = {"id", "call_id", "parsed", "parsed_arguments"}
        items = [{k: v for k, v in item.to_dict().items() if k not in hidden} for item in response.output]
        for item in items:
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return items, response.status, response.usage.to_dict()

    assert seen(final) == seen(whole)
    assert said == whole.output_text
    calls = [item for item in whole.output if item.type == "function_call"]
    assert len(calls) == text.count("<tool_call>")
    assert all(json.loads(call.arguments) == {"a": 1, "b": 2} and call.call_id for call in calls)
    assert len(ask(sdk, tools=[ADD], parallel_tool_calls=False).output) <= 2


def test_a_call_and_its_output_go_back(sdk: openai.OpenAI, say: Say, prompt_of: PromptOf) -> None:
    say(CALL)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}]
    first = ask(sdk, input=items, tools=[ADD], store=False)
    items += [item.to_dict() for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "3"})
    say("It is 3.")
    assert ask(sdk, input=items, tools=[ADD]).output_text == "It is 3."
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>" in prompt_of()


def test_a_kept_response_is_continued(sdk: openai.OpenAI, say: Say, prompt_of: PromptOf) -> None:
    say("One.")
    first = ask(sdk, input="first", instructions="Only now.")
    say("Two.")
    with sdk.responses.stream(model="m", input="second", previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    say("Three.")
    ask(sdk, input="third", previous_response_id=second.id)
    turns = ("user\nfirst", "assistant\nOne.", "user\nsecond", "assistant\nTwo.", "user\nthird")
    assert "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) in prompt_of()
    assert "Only now." not in prompt_of(), "instructions are not kept"

    assert sdk.responses.retrieve(second.id).output_text == "Two."
    listed = sdk.responses.input_items.list(second.id)
    assert [item.content[0].text for item in listed.data] == ["second"]  # type: ignore[union-attr]
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response is kept"):
        sdk.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="is not kept") as broken:
        ask(sdk, previous_response_id=second.id)
    assert (broken.value.param, broken.value.code) == ("previous_response_id", "previous_response_not_found")
    unkept = ask(sdk, store=False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(unkept.id)


def test_pages_of_input_items(http: httpx.Client, say: Say) -> None:
    say("yes")
    items = [{"role": "user", "content": f"number {i}"} for i in range(5)]
    response_id = http.post("/v1/responses", json={"input": items}).json()["id"]
    url = f"/v1/responses/{response_id}/input_items"
    first = http.get(url, params={"limit": 2, "order": "asc"}).json()
    second = http.get(url, params={"limit": 4, "order": "asc", "after": first["last_id"]}).json()
    texts = [item["content"][0]["text"] for page in (first, second) for item in page["data"]]
    assert texts == [item["content"] for item in items]
    assert (first["has_more"], second["has_more"]) == (True, False)
    wrong: list[dict[str, Any]] = [{"limit": 0}, {"limit": "x"}, {"limit": "1" * 5009}, {"limit": "٣"}, {"order": "up"}]
    for params in (*wrong, {"after": "nobody"}, {"after": "x" * 5009}):
        refused = http.get(url, params=params)
        assert refused.status_code == 400, params
        assert refused.json()["error"]["param"] in params
    for params in ({"starting_after": "1" * 5009}, {"stream": "yes"}):
        assert http.get(f"/v1/responses/{response_id}", params=params).status_code == 400


def test_truncation(sdk: openai.OpenAI, say: Say, prompt_of: PromptOf) -> None:
    say("yes")
    turns: Any = [{"role": "user", "content": f"turn {i} " + "the fox " * 20} for i in range(40)]
    with pytest.raises(openai.BadRequestError, match="context") as refused:
        ask(sdk, input=turns)
    assert refused.value.param == "input"
    ask(sdk, input=turns, truncation="auto", instructions="Be brief.", max_output_tokens=10)
    prompt = prompt_of()
    assert "Be brief." in prompt
    assert "turn 39 " in prompt
    assert "turn 0 " not in prompt
    kept = [i for i in range(40) if f"turn {i} " in prompt]
    assert kept == list(range(kept[0], 40))
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(sdk, input="the fox " * 600, truncation="auto")


def test_long_conversations_are_converted_off_the_event_loop(
    sdk: openai.OpenAI, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt at truncation converts all of it again."""
    say("yes")
    threads = []

    def recording(*args: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return to_chat(*args)

    monkeypatch.setattr(responses_opening, "to_chat", recording)
    turns: Any = [{"role": "user", "content": f"turn {i} " + "the fox " * 20} for i in range(250)]
    ask(sdk, input=turns, truncation="auto", max_output_tokens=10)
    assert len(threads) > 3
    with pytest.raises(openai.BadRequestError, match="context"):
        sdk.responses.input_tokens.count(model="m", input=turns)
    assert set(threads) == {"work"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "program", "id": "x"}]}, "input.0", "'program' is not supported"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]},
            "input.0.encrypted_content",
            "this server's",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.image_url",
            "reads text only",
        ),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role", "user"),
        ({"tools": [{"type": "file_search"}]}, "tools.0.type", "file_search"),
        ({"tools": [{"type": "mcp"}]}, "tools.0.type", "runs at OpenAI"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"tools": [ADD, ADD]}, "tools", "two tools are called 'add'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name", "sub"),
        ({"background": True, "store": False}, "background", "store"),
        ({"n": 2}, "n", "one answer"),
        ({"max_tokens": 2}, "max_tokens", "max_output_tokens"),
        ({"logprobs": 2}, "logprobs", "include"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", "usage"),
        ({"top_k": -2}, "top_k", "greater than or equal"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "prompts"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"max_output_tokens": 600}, "max_output_tokens", "600 of output"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "not kept"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    response = http.post("/v1/responses", json={"model": "m", "input": "hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_stream_that_breaks_says_so(sdk: openai.OpenAI, client: Any) -> None:
    client.fail_after = (2, RuntimeError("broken"))
    last = list(ask(sdk, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "internal server error"
    with pytest.raises(openai.InternalServerError):
        ask(sdk)
    assert client.num_running == 0


def test_the_asynchronous_sdk_and_tenants(client: Any, say: Say) -> None:
    say("The quick brown fox.")
    config = IngressConfig(api_key_hashes=(_hash("alice", "key-of-alice"), _hash("bob", "key-of-bob")))

    async def talk() -> str:
        transport = httpx.ASGITransport(create_app(client, RequestLimits(), config))
        http = httpx.AsyncClient(transport=transport)
        alice = openai.AsyncOpenAI(api_key="key-of-alice", base_url="http://test/v1", http_client=http)
        bob = openai.AsyncOpenAI(api_key="key-of-bob", base_url="http://test/v1", http_client=http)
        first = await alice.responses.create(model="m", input="hi")
        async with alice.responses.stream(model="m", input="so?", previous_response_id=first.id) as stream:
            text = (await stream.get_final_response()).output_text
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError):
            await bob.responses.create(model="m", input="so?", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.delete(first.id)
        return text

    assert asyncio.run(talk()) == "The quick brown fox."


def _hash(tenant: str, key: str) -> str:
    import hashlib

    return f"{tenant}=sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def test_a_response_cut_inside_a_call_is_continued(
    sdk: openai.OpenAI, served_model: Any, say: Say, prompt_of: PromptOf
) -> None:
    say(CALL)
    first = ask(sdk, tools=[ADD], max_output_tokens=len(served_model.tokenizer.encode(CALL[:-20], False)))
    assert (first.output[0].type, first.output[0].status) == ("function_call", "incomplete")
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(first.output[0].arguments)
    say("Two.")
    assert ask(sdk, input="go on", previous_response_id=first.id).output_text == "Two."
    assert "user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ngo on" in prompt_of()
    sent_back: list[Any] = [*first.output, {"role": "user", "content": "go on"}]
    assert ask(sdk, input=sent_back).output_text == "Two."


def test_what_nobody_reads_is_not_stored(http: httpx.Client, say: Say) -> None:
    say("yes")
    part = {"type": "output_text", "text": "x", "annotations": ["y" * 1000], "logprobs": ["z" * 1000]}
    body = {"input": [{"role": "assistant", "content": [part]}, {"role": "user", "content": "hi"}]}
    response_id = http.post("/v1/responses", json=body).json()["id"]
    listed = http.get(f"/v1/responses/{response_id}/input_items", params={"order": "asc"}).json()["data"]
    assert listed[0]["content"] == [{"type": "output_text", "text": "x", "annotations": []}]


def test_a_chain_is_bounded(make_client: Any, served_model: Any, http_to: Any) -> None:
    client = make_client(served_model)
    http = http_to(create_app(client, RequestLimits(max_messages=4)))
    last = None
    for _ in range(3):
        answer = http.post(
            "/v1/responses", json={"input": [], "previous_response_id": last} if last else {"input": "a"}
        )
        last = answer.json().get("id")
    assert answer.status_code == 200
    for _ in range(4):
        answer = http.post("/v1/responses", json={"input": [], "previous_response_id": last})
        last = answer.json().get("id", last)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("input", "previous_response_id")


def test_sampling_extensions_reach_the_engine(sdk: openai.OpenAI, client: Any, say: Say) -> None:
    say("The quick brown fox.")
    extra = {
        "top_k": 3, "min_p": 0.1, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25, "priority": 3,
        "repetition_penalty": 1.5, "ignore_eos": True, "stop": ["qq"], "stop_token_ids": [5], "min_tokens": 2,
        "logit_bias": {"7": 1.0}, "bad_words": ["zz"], "allowed_token_ids": list(range(300)), "cache_salt": "s",
    }  # fmt: skip
    ask(sdk, extra_body=extra)
    params = client.requests[-1].sampling
    got = {name: getattr(params, name) for name in extra if hasattr(params, name)}
    assert got == {
        **{name: value for name, value in extra.items() if name in got},
        **{"stop": ("qq",), "bad_words": ("zz",), "logit_bias": {7: 1.0}},
        **{"stop_token_ids": params.stop_token_ids, "allowed_token_ids": tuple(range(300))},
    }
    assert 5 in params.stop_token_ids
    assert client.requests[-1].placement.priority == 3


def test_every_sampling_parameter_is_given_on_or_refused() -> None:
    from app.api.openai.responses_conversion import to_chat
    from app.api.openai.responses_protocol import ResponsesRequest
    from app.records.sampling_params import SamplingParams

    values: dict[str, Any] = {"allowed_token_ids": [1], "structured_outputs": {"regex": "a"}, "logit_bias": {"1": 1}}
    values["repetition_detection"] = {"max_pattern_size": 2, "min_count": 2}
    for name, field in SamplingParams.model_fields.items():
        if name not in ResponsesRequest.refused:
            value = values.get(name, True if field.annotation is bool else ["x"] if name == "bad_words" else 1)
            value = ["x"] if name == "stop" else [1] if name == "stop_token_ids" else value
            body = ResponsesRequest.model_validate({"input": "x", name: value})
            assert getattr(to_chat(body, body.items), name) == getattr(body, name), name
            assert name in to_chat(body, body.items).model_fields_set, name


def test_logprobs(sdk: openai.OpenAI, client: Any, served_model: Any, say: Say) -> None:
    text = "The quick brown fox."
    say(text)
    include: Any = ["message.output_text.logprobs"]
    whole = ask(sdk, include=include, top_logprobs=2)
    entries = whole.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == text
    ids = served_model.tokenizer.encode(text, False)
    assert [entry.logprob for entry in entries] == [-token / 100 for token in ids]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = list(ask(sdk, include=include, top_logprobs=2, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in entries]
    assert events[-1].response.output[0].content[0].logprobs == entries
    assert all(not part.logprobs for part in ask(sdk).output[0].content)
    assert len(ask(sdk, include=include).output[0].content[0].logprobs) == len(ids)


def test_logprobs_of_a_text_beside_a_call(sdk: openai.OpenAI, client: Any, say: Say) -> None:
    client.step = 3
    say(f"Let me add. {CALL}")
    text = ask(sdk, include=["message.output_text.logprobs"], tools=[ADD]).output[0].content[0]
    said = "".join(entry.token for entry in text.logprobs)
    assert said.startswith("Let me add.")
    assert "arguments" not in said


def test_input_tokens(sdk: openai.OpenAI, http: httpx.Client, say: Say) -> None:
    say("One.")
    first = ask(sdk, input="first", instructions="Be brief.", tools=[ADD])
    counted = sdk.responses.input_tokens.count(model="m", input="first", instructions="Be brief.", tools=[ADD])
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    second = ask(sdk, input="second", previous_response_id=first.id)
    again = sdk.responses.input_tokens.count(model="m", input="second", previous_response_id=first.id)
    assert again.input_tokens == second.usage.input_tokens


def test_a_server_that_keeps_none_answers_without_a_warning(
    client: Any, http_to: Any, caplog: pytest.LogCaptureFixture
) -> None:
    http = http_to(create_app(client, RequestLimits(), IngressConfig(max_stored_responses=0)))
    with caplog.at_level("WARNING", "manta.api"):
        response = http.post("/v1/responses", json={"input": "hi"})
    assert response.status_code == 200
    assert not caplog.records
    assert http.get(f"/v1/responses/{response.json()['id']}").status_code == 404


def test_a_response_that_the_store_did_not_take_says_so(client: Any, http_to: Any) -> None:
    stores = shaky_stores(IngressConfig(), lambda kind, method: "undone" if method == "put" else "")
    http = http_to(create_app(client, RequestLimits(), IngressConfig(), None, stores))
    whole = http.post("/v1/responses", json={"input": "hi"})
    assert (whole.status_code, whole.json()["store"]) == (200, False)
    text = http.post("/v1/responses", json={"input": "hi", "stream": True}).text
    last = json.loads(text.strip().rsplit("data: ", 1)[1])
    assert (last["type"], last["response"]["store"]) == ("response.completed", False)
    assert http.post("/v1/responses", json={"input": "hi", "background": True}).status_code == 503
