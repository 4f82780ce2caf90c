"""Custom tools through the openai SDK: text in and out, of a grammar where there is one, over the built-in model."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from app.api.chat.messages import ChatOptions
from app.api.chat.prompt import check_conversation
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from tests.api.engine_in_this_process import EngineInThisProcess

REGEX = r'^(set|get) "[a-z]{1,6}" \d{2}\\$'  # what JSON escapes: quotes, and a backslash
LARK = 'start: SUM\nSUM: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]?/'
NESTED = 'start: "(" start ")" | "x"'
EITHER = 'start: word ("," word)* "\\n"\nword: /[a-c]"{1,3}/'
SAME = {"sum": r"[1-9]\d?(\+[1-9]\d?)+", "list": r'[a-c]"{1,3}(,[a-c]"{1,3})*\n'}  # in other words
ASK: Any = [{"role": "user", "content": "get the price of the stock JXD66."}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
FUNCTION: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}


def tool(name: str, syntax: str | None = None, definition: str = "") -> Any:
    given = None if syntax is None else {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {
        "type": "custom",
        "custom": {"name": name, "description": "Run it.", **({"format": given} if given else {})},
    }


def flat(entry: Any) -> Any:
    """A tool as /v1/responses has it."""
    custom = dict(entry["custom"])
    form = custom.pop("format", None)
    return {"type": "custom", **custom} | ({"format": {"type": "grammar", **form["grammar"]}} if form else {})


COMMAND, FREE = tool("command", "regex", REGEX), tool("free")
NAMED: Any = {"type": "custom", "custom": {"name": "command"}}
CHAT: Any = {"model": "tiny-chat", "messages": ASK, "temperature": 1.2, "max_tokens": 200}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineInThisProcess]:
    client = EngineInThisProcess()
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


@pytest.fixture
def writes_text(engine: EngineInThisProcess) -> Iterator[None]:
    """As if the model wrote calls as Qwen3-Coder does, with arguments as they are."""
    served = engine.models["tiny-chat"]
    engine.models["tiny-chat"] = dataclasses.replace(served, tool_parser="qwen3_coder")
    yield
    engine.models["tiny-chat"] = served


def calls_of(chunks: Any) -> list[list[str]]:
    """What the deltas of one choice add up to: type, name and input or arguments of each call. OpenAI's schema of
    chunks knows the type `function` only."""
    found: list[list[str]] = []
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        for call in delta.tool_calls or ():
            said = call.custom if hasattr(call, "custom") else call.function.to_dict()
            assert call.type == (None if hasattr(call, "custom") or not call.id else "function")
            if call.id:
                assert call.index == len(found)
                found.append(["custom" if hasattr(call, "custom") else call.type, said["name"], ""])
            found[call.index][2] += said.get("input") or said.get("arguments") or ""
    return found


def test_a_regular_expression_is_kept(sdk: openai.OpenAI) -> None:
    body = {**CHAT, "tools": [COMMAND, FUNCTION], "tool_choice": NAMED, "seed": 4}
    choice = sdk.chat.completions.create(**body).choices[0]
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "custom"
    assert call.custom.name == "command"
    assert re.fullmatch(REGEX, call.custom.input)
    chunks = list(sdk.chat.completions.create(**body, stream=True))
    assert calls_of(chunks) == [["custom", "command", call.custom.input]]
    assert sum(bool(c.choices and c.choices[0].delta.tool_calls) for c in chunks) > 3, "the input comes as it is made"
    functions = {**body, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    ((kind, _, arguments),) = calls_of(sdk.chat.completions.create(**functions, stream=True))
    assert kind == "function"
    assert isinstance(json.loads(arguments)["city"], str)


@pytest.mark.parametrize(("choice", "temperature"), [("auto", 0.0), ("required", 1.2)])
def test_a_lark_grammar_where_calls_hold_text(
    sdk: openai.OpenAI, writes_text: None, choice: Any, temperature: float
) -> None:
    """Under auto too, once the model begins a call."""
    body = {**CHAT, "tools": [tool("sum", "lark", LARK), tool("list", "lark", EITHER)], "tool_choice": choice}
    answer = sdk.chat.completions.create(**body | {"temperature": temperature}, parallel_tool_calls=False, seed=1)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert re.fullmatch(SAME[call.custom.name], call.custom.input)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_lark_grammar_where_calls_hold_json(sdk: openai.OpenAI, choice: Any) -> None:
    """One that a regular expression can say, as the grammars of coding agents are."""
    body = {**CHAT, "tools": [tool("list", "lark", EITHER.replace(")*", ") ~ 0..3"))], "tool_choice": choice}
    body |= {"temperature": 0.0 if choice == "auto" else 1.2, "parallel_tool_calls": False, "seed": 1}
    (call,) = sdk.chat.completions.create(**body).choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert re.fullmatch(SAME["list"], call.custom.input)


def test_the_tools_that_codex_sends_to_a_model_whose_name_it_knows(http: httpx.Client) -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}}
    web = {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]}
    patch = flat(tool("patch", "lark", 'start: head line+\nhead: "*" LF\nline: /[+-]/ /.*/ LF\n%import common.LF\n'))
    body = {"input": "hi", "tools": [patch, search, web], "text": {"verbosity": "low"}, "client_metadata": {"a": "b"}}
    body |= {"reasoning": {"effort": "medium"}, "include": ["reasoning.encrypted_content"], "store": False}
    answer = http.post("/v1/responses", json=body | {"max_output_tokens": 8})
    assert answer.status_code == 200, answer.text


def test_regular_expressions_where_calls_hold_text(sdk: openai.OpenAI, writes_text: None) -> None:
    message = sdk.chat.completions.create(**CHAT, tools=[COMMAND], tool_choice="required", seed=1).choices[0].message
    for call in message.tool_calls or ():
        assert call.type == "custom"
        assert re.fullmatch(REGEX, call.custom.input)
    assert message.tool_calls


def test_responses(sdk: openai.OpenAI) -> None:
    body: Any = {"model": "tiny-chat", "input": ASK, "tools": [flat(COMMAND), flat(FREE)], "temperature": 1.2}
    body |= {"tool_choice": {"type": "custom", "name": "command"}, "extra_body": {"seed": 7}}
    whole = sdk.responses.create(**body)
    (call,) = whole.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(REGEX, call.input)
    assert call.id
    assert call.id.startswith("ctc_")
    events = list(sdk.responses.create(**body, stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == call.input
    assert len(deltas) > 3
    items = [
        event.item for event in events if event.type in ("response.output_item.added", "response.output_item.done")
    ]
    assert [(item.type, item.input) for item in items] == [("custom_tool_call", ""), ("custom_tool_call", call.input)]
    assert items[0].id == done.item_id
    told = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "66"}
    follow: Any = {"model": "tiny-chat", "tools": body["tools"], "temperature": 0, "max_output_tokens": 8}
    kept = sdk.responses.create(**follow, input=[told], previous_response_id=whole.id)
    sent = sdk.responses.create(**follow, input=[*ASK, call.to_dict(), told])
    assert kept.output_text == sent.output_text
    assert kept.usage
    assert sent.usage
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert [item.type for item in sdk.responses.input_items.list(kept.id).data] == ["custom_tool_call_output"]


def test_what_the_model_sees(http: httpx.Client, engine: EngineInThisProcess) -> None:
    """Definition and earlier calls become those of a function of one string, in both dialects alike."""
    call = {"id": "c1", "type": "custom", "custom": {"name": "command", "input": 'get "a" 12\\'}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    asked = {"messages": messages, "tools": [COMMAND]}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    text = engine.models["tiny-chat"].tokenizer.decode(tokens, skip_special_tokens=False)
    assert json.dumps({"input": 'get "a" 12\\'}) in text
    assert json.dumps(REGEX)[1:-1] in text
    item = {"type": "custom_tool_call", "call_id": "c1", **call["custom"]}  # type: ignore[dict-item]
    told = {"type": "custom_tool_call_output", "call_id": "c1", "output": "7"}
    counted = http.post("/v1/responses/input_tokens", json={"input": [*ASK, item, told], "tools": [flat(COMMAND)]})
    assert counted.json()["input_tokens"] == len(tokens)


def test_a_choice_of_either_kind(sdk: openai.OpenAI) -> None:
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    answer = sdk.chat.completions.create(**CHAT, tools=[FUNCTION, COMMAND, FREE], tool_choice=allowed, seed=2)
    calls = answer.choices[0].message.tool_calls or ()
    assert calls
    assert {call.type for call in calls} == {"custom"}
    free: Any = {"type": "custom", "custom": {"name": "free"}}
    answer = sdk.chat.completions.create(**CHAT | {"temperature": 0}, tools=[FREE], tool_choice=free)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert not call.custom.input.startswith("{")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool("f", "lark", NESTED)]}, "tools", "writes the arguments of calls as JSON"),
    ({"tools": [tool("f", "regex", "(")], "tool_choice": "required"}, "tools", ""),
    ({"tools": [tool("f", "abnf", "x")]}, "tools.0.custom.format.grammar.syntax", "lark"),
    ({"tools": [tool("f", "regex", "")]}, "tools.0.custom.format.grammar.definition", "at least 1"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
        "tools.0.custom.format",
        "",
    ),
    ({"tools": [FREE, FREE]}, "tools", "two tools"),
    ({"tools": [FREE], "tool_choice": NAMED}, "tool_choice", "command"),
    ({"tools": [FREE], "tool_choice": {"type": "function", "function": {"name": "free"}}}, "tool_choice", "function"),
]


@pytest.mark.parametrize(("body", "field", "words"), BAD, ids=[f"{field}-{i}" for i, (_, field, _) in enumerate(BAD)])
def test_what_is_wrong_is_named(http: httpx.Client, body: dict[str, Any], field: str, words: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field, error
    assert words in error["message"]


def test_a_definition_counts_as_the_tools_do() -> None:
    options = ChatOptions.model_validate({"messages": ASK, "tools": [tool("f", "regex", "a" * 1000)]})
    check_conversation(options, RequestLimits(max_tools_bytes=2000))
    with pytest.raises(InvalidRequestError, match="bytes; at most 1000"):
        check_conversation(options, RequestLimits(max_tools_bytes=1000))


def test_what_is_wrong_in_responses_is_named(http: httpx.Client) -> None:
    bad = [
        ({"tools": [flat(FREE) | {"format": {"type": "grammar"}}]}, "tools.0.format"),
        ({"tools": [flat(tool("f", "lark", NESTED))]}, "tools"),
        ({"tools": [flat(FREE)], "tool_choice": {"type": "function", "name": "free"}}, "tool_choice.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input.0.input"),
    ]
    for body, field in bad:
        answer = http.post("/v1/responses", json={"input": "hi", **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field, answer.text
