"""Tools and reasoning through the openai SDK: over a scripted engine, and over the built-in model with its grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from app.checkpoints.model_info import ModelInfo
from tests.api.engine_in_this_process import EngineInThisProcess

WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PRICE: Any = {
    "type": "object",
    "properties": {"code": {"type": "string", "maxLength": 8}, "in": {"enum": ["EUR", "GBP"]}},
    "required": ["code"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_stock_price": PRICE}


def tool(name: str, **rest: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **rest}}


TOOLS: Any = [tool("get_weather"), tool("get_stock_price", description="Get the price of a stock.")]
ASK: Any = {"model": "tiny-chat", "messages": [{"role": "user", "content": "get the price of the stock JXD66."}]}
THINK: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineInThisProcess]:
    client = EngineInThisProcess()
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


def merged(chunks: Any) -> dict[str, Any]:
    """What the deltas of one choice add up to, and its logprobs and finish reason."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": [], "finish": None}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        found["content"] += choice.delta.content or ""
        found["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index == len(found["calls"])
                found["calls"].append([call.function.name, ""])
            found["calls"][call.index][1] += call.function.arguments or ""
        found["logprobs"] += choice.logprobs.content if choice.logprobs else []
        found["finish"] = choice.finish_reason or found["finish"]
    return found


def whole(answer: Any) -> dict[str, Any]:
    """The same of a collected answer."""
    choice = answer.choices[0]
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning", None) or "",
        "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
        "logprobs": choice.logprobs.content if choice.logprobs else [],
        "finish": choice.finish_reason,
    }


def same(streamed: dict[str, Any], collected: dict[str, Any]) -> None:
    """Equal; logprobs up to rounding, since the second of two requests finds its prompt in the cache."""
    tokens, others = streamed.pop("logprobs"), list(collected["logprobs"])
    assert streamed == {name: value for name, value in collected.items() if name != "logprobs"}
    assert [token.token for token in tokens] == [token.token for token in others]
    assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in others], abs=1e-3)


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
CHOICES: list[tuple[Any, bool, bool]] = [
    ("required", True, True),
    ("required", False, False),
    (NAMED, True, False),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, True, False),
]


@pytest.mark.parametrize(("choice", "parallel", "thinks"), CHOICES, ids=["required", "one", "named", "allowed"])
def test_a_choice_is_enforced(sdk: openai.OpenAI, choice: Any, parallel: bool, thinks: bool) -> None:
    """At a temperature where the model by itself writes nonsense."""
    body = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "logprobs": True}
    body |= {"max_tokens": 400, "temperature": 1.2} | (THINK if thinks else {})
    for seed in range(1 if parallel else 2):
        answer = whole(sdk.chat.completions.create(**body, seed=seed))
        is_named = isinstance(choice, dict) and choice["type"] == "function"
        assert answer["finish"] == ("stop" if is_named else "tool_calls")
        assert not answer["content"]
        assert bool(answer["reasoning"]) or not thinks
        assert answer["calls"]
        assert len(answer["calls"]) == 1 or (parallel and not is_named)
        for name, arguments in answer["calls"]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            assert isinstance(choice, str) or name in json.dumps(choice)
        same(merged(sdk.chat.completions.create(**body, seed=seed, stream=True)), answer)


def test_strict_tools_under_auto(sdk: openai.OpenAI) -> None:
    """The model may answer in words; where it calls, arguments follow the schema."""
    tools = [tool("get_weather", strict=True), tool("get_stock_price", strict=True)]
    body = {**ASK, "tools": tools, "max_tokens": 200}
    calls = whole(sdk.chat.completions.create(**body, temperature=0))["calls"]
    assert calls == [["get_stock_price", '{"code": "JXD66"}']], "the grammar leaves the model's own way open"
    words = {**body, "messages": [{"role": "user", "content": "hi"}]}
    assert whole(sdk.chat.completions.create(**words, temperature=0))["content"]
    for seed in range(3):
        answer = whole(sdk.chat.completions.create(**body, temperature=1.8, seed=seed))
        if answer["finish"] != "length":
            for name, arguments in answer["calls"]:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_calls_or_json(sdk: openai.OpenAI) -> None:
    """response_format beside tools binds the words, not the calls."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["n"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    body: Any = {**ASK, "tools": TOOLS, "response_format": form, "max_tokens": 300, "temperature": 0}
    assert whole(sdk.chat.completions.create(**body))["calls"]
    for seed in range(2):
        answer = whole(sdk.chat.completions.create(**body | {"temperature": 2.0}, seed=seed))
        if not answer["calls"]:
            jsonschema.validate(json.loads(answer["content"]), schema)


class GetWeather(BaseModel):
    """Get the weather."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


def test_the_sdk_s_own_tools(sdk: openai.OpenAI) -> None:
    """pydantic_function_tool (which is strict), parse and the stream helper."""
    body: Any = {**ASK, "tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": "required"}
    body |= {"temperature": 1.0, "seed": 3, "max_tokens": 200, "parallel_tool_calls": False}
    parsed = sdk.chat.completions.parse(**body).choices[0].message.tool_calls
    assert parsed
    assert isinstance(parsed[0].function.parsed_arguments, GetWeather)
    kinds = []
    with sdk.chat.completions.stream(**body) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls
    assert final.message.tool_calls[0].function.parsed_arguments == parsed[0].function.parsed_arguments
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_a_tool_loop(sdk: openai.OpenAI) -> None:
    """Ask, call, return the result, answer: what the SDK returns goes back as it is."""
    messages: Any = list(ASK["messages"])
    for _ in range(4):
        answer = sdk.chat.completions.create(
            model="tiny-chat", messages=messages, tools=TOOLS, temperature=0, max_tokens=100
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            assert json.loads(call.function.arguments) == {"code": "JXD66"}
            result = json.dumps({"price": 253.83, "currency": "GBP"})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert messages[-1].content == "The price of JXD66 is 253.83 GBP."
    assert len(messages) == 4


def test_reasoning(sdk: openai.OpenAI, http: httpx.Client) -> None:
    body: Any = {"model": "tiny-chat", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    body |= {"temperature": 0, "max_tokens": 100, "logprobs": True}
    answer = whole(sdk.chat.completions.create(**body, **THINK))
    assert answer["content"] == "12 + 30 = 42."
    assert answer["reasoning"].strip() == answer["reasoning"] != ""
    same(merged(sdk.chat.completions.create(**body, **THINK, stream=True)), answer)
    raw = http.post("/v1/chat/completions", json=body | THINK["extra_body"]).json()["choices"][0]["message"]
    assert raw["reasoning"] == raw["reasoning_content"] == answer["reasoning"]
    silent = body | THINK["extra_body"] | {"include_reasoning": False}
    raw = http.post("/v1/chat/completions", json=silent).json()["choices"][0]["message"]
    assert raw["reasoning"] is None
    assert raw["content"] == answer["content"]
    streamed = http.post("/v1/chat/completions", json=silent | {"stream": True}).text
    assert "reasoning" not in streamed
    cut = http.post("/v1/chat/completions", json=body | THINK["extra_body"] | {"max_tokens": 5}).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (None, "length")
    assert answer["reasoning"].startswith(cut["message"]["reasoning"])
    history = [*body["messages"], {"role": "assistant", "content": answer["content"], "reasoning": "I add."}]
    again = http.post("/v1/chat/completions", json=body | {"messages": [*history, *body["messages"]]})
    assert again.status_code == 200, again.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASK["messages"], **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field, answer.text


@pytest.mark.parametrize("arguments", ["{", "[1]", '"text"', "[" * 100_000], ids=["broken", "list", "string", "deep"])
def test_calls_in_the_history_are_objects(http: httpx.Client, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "tool_calls.0.function.arguments" in answer.json()["error"]["param"]


@pytest.mark.slow
def test_accuracy_with_and_without_the_grammar(sdk: openai.OpenAI) -> None:
    """The built-in model's held-out tool calls: a grammar must not lead it off its way."""
    path = Path(ModelInfo.from_directory("tiny-chat").directory) / "heldout.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cases = [case for case in lines if case["family"] == "tool_call"]
    right = {"auto": 0, "required": 0, "strict": 0}
    for case in cases:
        for way in right:
            tools = [{**t, "function": {**t["function"], "strict": way == "strict"}} for t in case["tools"]]
            choice: Any = "required" if way == "required" else "auto"
            answer = sdk.chat.completions.create(
                model="tiny-chat",
                messages=case["messages"],
                tools=tools,
                tool_choice=choice,
                temperature=0,
                max_tokens=200,
            )
            found = [[name, json.loads(arguments)] for name, arguments in whole(answer)["calls"]]
            right[way] += found == [[call["name"], call["arguments"]] for call in case["expected"]]
    print({way: f"{count}/{len(cases)}" for way, count in right.items()})
    assert min(right["required"], right["strict"]) >= right["auto"] >= 0.9 * len(cases), right


@pytest.mark.slow
def test_random_weights_make_valid_calls(serve: Any) -> None:
    """A model that knows nothing still calls by the schema; reasoning that it opened by chance it would never close."""
    client = EngineInThisProcess(load_format="dummy")
    try:
        with openai.OpenAI(base_url=f"{serve(client).url}/v1", api_key="none", max_retries=0) as sdk:
            for seed in range(50):
                answer = whole(
                    sdk.chat.completions.create(
                        **ASK,
                        tools=TOOLS,
                        tool_choice="required",
                        parallel_tool_calls=False,
                        temperature=1,
                        seed=seed,
                        extra_body={"thinking_token_budget": 0},
                    )
                )
                ((name, arguments),) = answer["calls"]
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    finally:
        client.engine.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_a_budget(sdk: openai.OpenAI, engine: EngineInThisProcess, stream: bool) -> None:
    body: Any = {"model": "tiny-chat", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    body |= {"temperature": 0, "max_tokens": 100}
    tokenizer = engine.models["tiny-chat"].tokenizer

    def ask(budget: int) -> dict[str, Any]:
        extra = {**THINK["extra_body"], "thinking_token_budget": budget}
        answer = sdk.chat.completions.create(**body, extra_body=extra, stream=stream)
        return merged(answer) if stream else whole(answer)

    free = ask(-1)
    assert len(tokenizer.encode(free["reasoning"])) > 6
    assert ask(1000) == free
    for budget in (0, 3):
        cut = ask(budget)
        assert free["reasoning"].startswith(cut["reasoning"])
        assert len(tokenizer.encode(cut["reasoning"], add_special_tokens=False)) <= budget
        assert cut["content"]
        assert cut["finish"] == "stop"


def test_the_budget_in_other_dialects(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    body = {"model": "tiny-chat", "messages": messages, "max_tokens": 2000, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert http.post("/v1/messages", json={**body, "thinking": thinking}).status_code == 200
    with_beams = {**body, "use_beam_search": True, "thinking_token_budget": 5}
    answer = http.post("/v1/chat/completions", json=with_beams)
    assert answer.json()["error"]["param"] == "thinking_token_budget"
