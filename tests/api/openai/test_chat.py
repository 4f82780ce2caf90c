"""/v1/chat/completions through the real SDK, over a scripted engine."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest

from app.records.bad_words import BadWords

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
TEXTS = [
    "plain words, the end.",
    'quotes " and \\ and \n\t control \x01 characters',
    "Grüße aus Köln 🙂👩‍👩‍👧 नमस्ते 東京 \u2028 end",
    "emoji only 🙈🙉🙊",
    "",
    " leading and trailing spaces  ",
    "<b>html</b> & friends </script>",
]


def say(client: Any, text: str) -> None:
    """Make the engine answer `text`."""
    tokenizer = client.models["m"].tokenizer
    client.script = lambda request: tokenizer.encode(text, add_special_tokens=False)


def joined(chunks: Any, index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


@pytest.mark.parametrize("step", [1, 3, 100])
def test_streamed_equals_collected(sdk: openai.OpenAI, client: Any, step: int) -> None:
    client.step = step
    for text in TEXTS:
        say(client, text)
        whole = sdk.chat.completions.create(model="m", messages=HI)
        chunks = list(sdk.chat.completions.create(model="m", messages=HI, stream=True))
        assert whole.choices[0].message.content == text
        assert joined(chunks) == text
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_answer_shape(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "Hello.")
    raw = sdk.chat.completions.with_raw_response.create(model="alias", messages=HI)
    answer = raw.parse()
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "alias"
    assert answer.system_fingerprint
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is None
    tokenizer = client.models["m"].tokenizer
    prompt = client.models["m"].chat_template.render([{"role": "user", "content": "hi"}])
    num_prompt = len(tokenizer.encode(prompt, add_special_tokens=False))
    num_output = len(tokenizer.encode("Hello.", add_special_tokens=False)) + 1
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_output)
    assert usage.total_tokens == num_prompt + num_output
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == min(16, num_prompt // 2)
    assert raw.headers["x-manta-replica"] == "replica-7"
    assert raw.headers["x-request-id"]


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The parsed events of a stream; checks the frame."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    parts = text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    assert parts[-2] == "data: [DONE]"
    return [json.loads(part[6:]) for part in parts[:-2]]


def test_chunk_shapes(http: httpx.Client, client: Any) -> None:
    say(client, "the fox")
    body = {"model": "m", "messages": HI, "stream_options": {"include_usage": True}}
    first, *texts, finish, last = events(http, "/v1/chat/completions", body)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for chunk in texts:
        (choice,) = chunk["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
        assert set(choice["delta"]) == {"content"}
        assert choice["finish_reason"] is None
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in [first, *texts, finish])
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in [first, *texts, finish, last]}) == 1
    assert first["object"] == "chat.completion.chunk"
    without = events(http, "/v1/chat/completions", {"model": "m", "messages": HI})
    assert all("usage" not in chunk for chunk in without)
    assert without[-1]["choices"][0]["finish_reason"] == "stop"


def test_continuous_usage(http: httpx.Client, client: Any) -> None:
    say(client, "the quick brown fox")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http, "/v1/chat/completions", {"messages": HI, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > counts[1]
    assert counts[0] == 0, "the role is no token"


def test_usage_tells_of_drafts(http: httpx.Client, client: Any) -> None:
    say(client, "the fox")
    body = {"model": "m", "messages": HI, "stream_options": {"include_usage": True}}
    assert "completion_tokens_details" not in events(http, "/v1/chat/completions", body)[-1]["usage"]
    client.last = {"num_right_drafts": 5, "num_wrong_drafts": 2}
    expected = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    streamed = events(http, "/v1/chat/completions", body)[-1]
    several = http.post("/v1/chat/completions", json={"model": "m", "messages": HI, "n": 2}).json()
    batch = http.post("/v1/chat/completions/batch", json={"model": "m", "messages": [HI, HI]}).json()
    assert streamed["usage"]["completion_tokens_details"] == expected
    for answer in (several, batch):
        assert answer["usage"]["completion_tokens_details"] == {name: 2 * count for name, count in expected.items()}


def test_stop_strings_across_tokens(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "one two STOP three")
    for stop in ("STOP", ["zzz", "o STOP t"], "\n"):
        whole = sdk.chat.completions.create(model="m", messages=HI, stop=stop)
        chunks = list(sdk.chat.completions.create(model="m", messages=HI, stop=stop, stream=True))
        expected = {"STOP": "one two ", "\n": "one two STOP three"}.get(str(stop), "one tw")
        assert whole.choices[0].message.content == joined(chunks) == expected
    raw = sdk.chat.completions.create(model="m", messages=HI, stop="STOP")
    assert raw.choices[0].stop_reason == "STOP"  # type: ignore[attr-defined]
    assert client.num_aborted >= 4, "the engine's iterator is closed at the stop"
    kept = sdk.chat.completions.create(
        model="m", messages=HI, stop="STOP", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].message.content == "one two STOP"


def test_n_choices(sdk: openai.OpenAI, client: Any) -> None:
    tokenizer = client.models["m"].tokenizer
    client.script = lambda r: tokenizer.encode(f"choice {r.choice_index} says the fox", add_special_tokens=False)
    whole = sdk.chat.completions.create(model="m", messages=HI, n=4)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    chunks = list(
        sdk.chat.completions.create(model="m", messages=HI, n=4, stream=True, stream_options={"include_usage": True})
    )
    for i, choice in enumerate(whole.choices):
        assert choice.message.content == joined(chunks, i) == f"choice {i} says the fox"
    assert len({request.request_id for request in client.requests[:4]}) == 4
    assert len({request.sampling.seed for request in client.requests[:4]}) == 1, "one seed, four choices"
    assert client.requests[0].sampling.seed != client.requests[4].sampling.seed
    assert whole.usage is not None
    one = sdk.chat.completions.create(model="m", messages=HI)
    assert one.usage is not None
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens, "a prompt counts once"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "a🙈")
    tokenizer = client.models["m"].tokenizer
    ids = [*tokenizer.encode("a🙈", add_special_tokens=False), tokenizer.eos_token_id]
    whole = sdk.chat.completions.create(model="m", messages=HI, logprobs=True, top_logprobs=2)
    chunks = list(sdk.chat.completions.create(model="m", messages=HI, logprobs=True, top_logprobs=2, stream=True))
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert [entry.logprob for entry in content] == [-token / 100 for token in ids]
    assert b"".join(bytes(entry.bytes or []) for entry in content[:-1]).decode() == "a🙈"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(ids)
    assert content[0].top_logprobs[0].logprob == -0.1
    streamed = [e for c in chunks for choice in c.choices if choice.logprobs for e in choice.logprobs.content or []]
    assert streamed == content
    none = sdk.chat.completions.create(model="m", messages=HI, logprobs=True)
    assert none.choices[0].logprobs is not None
    assert none.choices[0].logprobs.content is not None
    assert none.choices[0].logprobs.content[0].top_logprobs == []


def test_infinite_logprobs_are_json(http: httpx.Client, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    say(client, "ab")
    outputs = client._outputs

    def infinite(*args: Any) -> Any:
        for output in outputs(*args):
            for entry in output.logprobs or []:
                entry.logprobs[-1] = -math.inf
            yield output

    monkeypatch.setattr(client, "_outputs", infinite)
    answer = http.post("/v1/chat/completions", json={"messages": HI, "logprobs": True, "top_logprobs": 1})
    assert "Infinity" not in answer.text
    assert answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -9999.0


def test_sampling_parameters_reach_the_engine(sdk: openai.OpenAI, client: Any) -> None:
    sdk.chat.completions.create(
        model="m",
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -3},
        seed=7,
        stop=["x"],
        max_completion_tokens=9,
        max_tokens=11,
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [4],
            "bad_words": ["fox"],
            "allowed_token_ids": [1, 2, 3],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "priority": -2,
            "cache_salt": "tenant",
        },
    )
    request = client.requests[-1]
    params = request.sampling
    assert (params.temperature, params.top_p, params.presence_penalty, params.frequency_penalty) == (0.5, 0.9, 0.1, 0.2)
    assert (params.logit_bias, params.seed, params.stop, params.max_tokens) == ({5: -3.0}, 7, ("x",), 9)
    assert (params.top_k, params.min_p, params.repetition_penalty, params.ignore_eos) == (3, 0.1, 1.1, True)
    assert (params.min_tokens, params.stop_token_ids, params.allowed_token_ids) == (2, (4,), (1, 2, 3))
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert request.placement.priority == -2
    assert request.placement.cache_root
    assert request.asked(BadWords)
    sdk.chat.completions.create(model="m", messages=HI)
    plain = client.requests[-1]
    assert plain.placement.cache_root == b""
    prompt_room = 512 - len(plain.prompt_token_ids)
    assert plain.sampling.max_tokens == prompt_room, "a chat may use all the room there is"
    assert plain.sampling.seed is not None


def test_model_defaults_apply_unless_given(
    serve: Any, serve_model: Any, write_model_dir: Any, make_client: Any, tmp_path: Any
) -> None:
    path = write_model_dir(tmp_path, temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=40)
    client = make_client(serve_model(path))
    url = serve(client).url + "/v1/chat/completions"
    httpx.post(url, json={"messages": HI})
    params = client.requests[-1].sampling
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.95, 20, 40)
    httpx.post(url, json={"messages": HI, "temperature": 0, "top_p": None, "max_tokens": 50})
    params = client.requests[-1].sampling
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.0, 0.95, 20, 50)


def test_messages_become_the_template_s(sdk: openai.OpenAI, client: Any) -> None:
    messages: Any = [
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "call it", "name": "bob"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    sdk.chat.completions.create(model="m", messages=messages)
    text = client.models["m"].tokenizer.decode(client.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>system\none\ntwo<|im_end|>" in text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert text.endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    sdk.chat.completions.create(
        model="m",
        messages=[*HI, {"role": "assistant", "content": "The answer"}],
        extra_body={"continue_final_message": True},
    )
    text = client.models["m"].tokenizer.decode(client.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nThe answer")


def test_harmless_fields_and_nulls_are_accepted(http: httpx.Client) -> None:
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "logit_bias",
        "tools",
        "seed",
        "stream_options",
        "audio",
    ]
    body = {
        "messages": HI,
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "none",
        **dict.fromkeys(fields),
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "ü"}}\n</tool_call>'


@pytest.mark.parametrize("step", [1, 4, 100])
def test_tool_calls(sdk: openai.OpenAI, client: Any, step: int) -> None:
    client.step = step
    say(client, f"I will add.\n{CALL}\n{CALL}")
    whole = sdk.chat.completions.create(model="m", messages=HI, tools=[TOOL])
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content == "I will add."
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]  # type: ignore[union-attr]
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "s": "ü"}  # type: ignore[union-attr]
    assert len({call.id for call in message.tool_calls}) == 2
    chunks = list(sdk.chat.completions.create(model="m", messages=HI, tools=[TOOL], stream=True))
    calls = [call for c in chunks for choice in c.choices for call in choice.delta.tool_calls or []]
    named = [(call.index, call.function.name) for call in calls if call.function and call.function.name]
    assert named == [(0, "add"), (1, "add")]
    assert all(bool(call.id) == bool(call.function and call.function.name) for call in calls), "an id once a call"
    for index, expected in enumerate(message.tool_calls):
        text = "".join(call.function.arguments or "" for call in calls if call.index == index and call.function)
        assert text == expected.function.arguments  # type: ignore[union-attr]
    assert joined(chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    prompt = client.models["m"].tokenizer.decode(client.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert '"name": "add"' in prompt
    single = sdk.chat.completions.create(model="m", messages=HI, tools=[TOOL], parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls or []) == 1


def test_tool_choice_none_offers_no_tools(sdk: openai.OpenAI, client: Any) -> None:
    say(client, CALL)
    whole = sdk.chat.completions.create(model="m", messages=HI, tools=[TOOL], tool_choice="none")
    assert whole.choices[0].message.content == CALL
    assert whole.choices[0].finish_reason == "stop"
    prompt = client.models["m"].tokenizer.decode(client.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "add" not in prompt


def test_extensions_in_the_answer(http: httpx.Client, client: Any) -> None:
    say(client, "ab")
    body = {"messages": HI, "return_token_ids": True, "prompt_logprobs": 1, "request_id": "mine-1"}
    response = http.post("/v1/chat/completions", json=body)
    answer = response.json()
    request = client.requests[-1]
    assert answer["prompt_token_ids"] == request.prompt_token_ids
    assert answer["choices"][0]["token_ids"][-1] == client.models["m"].tokenizer.eos_token_id
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(request.prompt_token_ids)
    entry = answer["prompt_logprobs"][1][str(request.prompt_token_ids[1])]
    assert set(entry) == {"logprob", "rank", "decoded_token"}
    assert response.headers["x-request-id"] == "mine-1"
    chunks = events(http, "/v1/chat/completions", {"messages": HI, "return_token_ids": True})
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [request.prompt_token_ids]
    assert "prompt_token_ids" in chunks[0]
    plain = http.post("/v1/chat/completions", json={"messages": HI}).json()
    for fields, names in (
        (plain, ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params")),
        (plain["choices"][0], ("logprobs", "token_ids", "stop_reason")),
        (plain["choices"][0]["message"], ("reasoning", "refusal")),
    ):
        assert {name: fields[name] for name in names} == dict.fromkeys(names), "null, but there"
    cut = http.post("/v1/chat/completions", json={"messages": HI, "truncate_prompt_tokens": 3})
    assert cut.json()["usage"]["prompt_tokens"] == 3
    assert client.requests[-1].prompt_token_ids == request.prompt_token_ids[-3:]


SAID: Any = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, "}]


@pytest.mark.parametrize(
    ("messages", "fields", "before"),
    [
        (SAID, {"continue_final_message": True}, "One, "),
        (SAID, {"add_generation_prompt": False}, "One, "),
        (SAID, {}, "One, "),
        ([*SAID[:1], {"role": "assistant", "content": [{"type": "text", "text": "One"}] * 2}], {}, "OneOne"),
        (SAID[:1], {}, ""),
        (SAID, {"echo": False}, ""),
    ],
)
def test_echo_puts_the_assistant_s_last_words_before_the_answer(
    sdk: openai.OpenAI, client: Any, messages: Any, fields: dict[str, Any], before: str
) -> None:
    say(client, "two.")
    body: dict[str, Any] = {"model": "m", "messages": messages, "n": 2, "extra_body": {"echo": True, **fields}}
    whole = sdk.chat.completions.create(**body)
    assert [choice.message.content for choice in whole.choices] == [f"{before}two."] * 2
    for options in ({}, {"logprobs": True}):
        chunks = list(sdk.chat.completions.create(**body, **options, stream=True))
        assert [joined(chunks, index) for index in (0, 1)] == [f"{before}two."] * 2
    kept = sdk.chat.completions.create(**body, store=True)
    stream = list(sdk.chat.completions.create(**body, store=True, stream=True))
    for one in (kept.id, stream[0].id):
        assert sdk.chat.completions.retrieve(one).choices[1].message.content == f"{before}two."


def test_echo_stands_before_a_call(sdk: openai.OpenAI, client: Any) -> None:
    say(client, '<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    answer = sdk.chat.completions.create(model="m", messages=SAID, tools=[TOOL], extra_body={"echo": True})
    assert answer.choices[0].message.content == "One, "
    assert len(answer.choices[0].message.tool_calls or ()) == 1
