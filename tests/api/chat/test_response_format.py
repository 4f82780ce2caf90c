"""response_format and structured_outputs over HTTP and an engine; the openai SDK, jsonschema and re judge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests import limits
from tests.api.engine_in_this_process import EngineInThisProcess

CHAT: Any = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Tell me about a person."}]}
HEADERS = {"content-type": "application/json"}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: str = Field(max_length=8)


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=150)
    pets: list[Pet] = Field(max_length=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineInThisProcess]:
    client = EngineInThisProcess()
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema in vLLM's field, without white space, so that a length bounds the text."""
    return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


def test_the_sdk_parses_into_models(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(**CHAT, response_format=Person, seed=1, temperature=1, max_tokens=800)
    assert isinstance(answer.choices[0].message.parsed, Person), answer
    assert answer.choices[0].finish_reason == "stop"


def test_the_sdk_streams_into_models(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(**CHAT, response_format=Pet, seed=4, max_tokens=200) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    whole = sdk.chat.completions.parse(**CHAT, response_format=Pet, seed=4, max_tokens=200).choices[0]
    assert isinstance(streamed.message.parsed, Pet)
    assert streamed.message.content == whole.message.content


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"enum": ["ok"]}}},
        {
            "type": "structural_tag",
            "format": {"type": "tag", "begin": '{"b":', "content": {"type": "regex", "pattern": "[0-9]"}, "end": "}"},
        },
    ],
    ids=lambda format: str(format["type"]),
)
def test_response_formats(http: httpx.Client, format: dict[str, Any]) -> None:
    for path, rest in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
        body = {**rest, "response_format": format, "max_tokens": 30, "temperature": 0}
        answer = http.post(f"/v1/{path}", json=body).json()
        choice = answer["choices"][0]
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        if format["type"] == "json_object":  # which bounds nothing, so that the answer may be cut off
            assert text.startswith("{")
        else:
            assert choice["finish_reason"] == "stop"
            assert json.loads(text) == "ok" or re.fullmatch(r'{"b":[0-9]}', text)


def test_text_is_no_constraint(http: httpx.Client) -> None:
    body = {**CHAT, "max_tokens": 8, "temperature": 0}
    plain = http.post("/v1/chat/completions", json=body).json()
    text = http.post("/v1/chat/completions", json={**body, "response_format": {"type": "text"}}).json()
    assert plain["choices"][0]["message"] == text["choices"][0]["message"]


@pytest.mark.parametrize(
    ("field", "matches"),
    [
        ({"regex": r"\d{3}-[a-z]{2,6}"}, lambda text: re.fullmatch(r"\d{3}-[a-z]{2,6}", text)),
        ({"choice": ["yes", "no", 'a "quoted" one/\\']}, lambda text: text in ["yes", "no", 'a "quoted" one/\\']),
        ({"grammar": 'root ::= "x" y\ny ::= [0-9] | "(" y ")"'}, lambda text: re.fullmatch(r"x\(*\d\)*", text)),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_every_choice_matches(http: httpx.Client, field: dict[str, Any], matches: Any) -> None:
    body = {**CHAT, "structured_outputs": field, "n": 4, "seed": 1, "temperature": 1, "max_tokens": 200}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert len(choices) == 4
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert matches(choice["message"]["content"]), choice


def test_with_logprobs_stop_strings_and_min_tokens(http: httpx.Client) -> None:
    body = {**CHAT, "seed": 3, "temperature": 1, "max_tokens": 60}
    said = {**body, "structured_outputs": {"choice": ["one two three"]}}
    choice = http.post("/v1/chat/completions", json={**said, "stop": [" three"]}).json()["choices"][0]
    assert choice["message"]["content"] == "one two"
    assert choice["stop_reason"] == " three"
    choice = http.post("/v1/chat/completions", json={**said, "min_tokens": 50}).json()["choices"][0]
    assert choice["message"]["content"] == "one two three"  # the grammar cannot go on, whatever min_tokens wants
    answer = http.post("/v1/chat/completions", json={**said, "logprobs": True, "top_logprobs": 2}).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    said_after = "".join(entry["token"] for entry in entries).rpartition("</think>")[2]
    assert said_after == "one two three"  # the model may think before it, if it opens reasoning
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_min_tokens_where_the_grammar_may_go_on(http: httpx.Client) -> None:
    body = {**CHAT, "structured_outputs": {"regex": "a{1,200}"}, "min_tokens": 12, "max_tokens": 300, "seed": 1}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] >= 12
    assert set(answer["choices"][0]["message"]["content"]) == {"a"}


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
         "response_format", "not"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name", "pattern"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "odd"}}}, "response_format", "odd"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format",
         "excludes"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs.json", "strin"),
        ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/x"}}}, "structured_outputs.json", "retriev"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json", "nothing matches"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar", "nowhere"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}, "allowed_token_ids", "structured_outputs"),
        ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
    ],
)  # fmt: skip
def test_refusals_name_field_and_reason(http: httpx.Client, change: Any, param: str, says: str) -> None:
    for stream in (False, True):
        answer = http.post("/v1/chat/completions", json={**CHAT, **change, "stream": stream, "max_tokens": 4})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert says in error["message"], error


def hostile() -> dict[str, Any]:
    deep: Any = {"type": "integer"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    many = {f"p{i}": {"type": "string"} for i in range(6000)}
    return {
        "deep": {"json": json.dumps(deep)},
        "many": {"json": {"type": "object", "properties": many, "additionalProperties": False}},
        "nested": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    }


@pytest.mark.parametrize("name", ["deep", "many", "nested"])
def test_hostile_grammars_are_refused_and_nobody_is_harmed(http: httpx.Client, name: str, sdk: openai.OpenAI) -> None:
    spec = hostile()[name]
    field = f"structured_outputs.{next(iter(spec))}"
    with limits.soon(20.0, "a refusal"):
        answer = http.post("/v1/chat/completions", json={**CHAT, "structured_outputs": spec, "max_tokens": 4})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
    schema["additionalProperties"] = False
    after = sdk.chat.completions.create(**CHAT, extra_body=compact(schema), max_tokens=20)
    jsonschema.validate(json.loads(after.choices[0].message.content or ""), schema)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_go_on_is_the_request_s_fault(http: httpx.Client, stream: bool) -> None:
    """Whether it grew too much work, or the request itself forbids all that it allows: no error of the server's, and
    no answer that ends as if it matched."""
    costly = {"structured_outputs": {"regex": "(a|b|ab){1,5000}{1,5000}c"}, "seed": 1}
    stuck = {"structured_outputs": {"regex": "~{9}"}, "bad_words": ["~" * count for count in range(1, 10)]}
    for change in (costly, stuck):
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 300, "stream": stream, **change})
        lines = [line for line in answer.text.splitlines() if '"error"' in line]
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs"), answer.text
        assert answer.status_code == 400 or (stream and answer.status_code == 200)
