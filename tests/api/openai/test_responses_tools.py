"""Tools of /v1/responses beyond plain functions: namespaces, those the client runs, and hosted ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pydantic
import pytest
import typing_extensions
from openai.types import responses
from openai.types.responses import tool_param

from app.api.openai.responses_calls import call_forms
from app.api.openai.responses_items import InputItem
from app.api.openai.responses_tools import IGNORED_TOOLS, REFUSED_TOOLS, ResponsesTool
from app.text.served_model import ServedModel
from tests.api.conftest import served

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(responses.ResponseStreamEvent)
OUTPUT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(responses.ResponseOutputItem)
INPUT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(InputItem)
TOOL: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponsesTool)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers.",
        "tools": [
            {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "function", "name": "find", "parameters": {"type": "object"}},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "web_search", "external_web_access": False, "search_context_size": "low"},
]
CALLS: list[tuple[str, dict[str, Any], type[Any], dict[str, Any]]] = [
    (
        "crm__find",
        {"id": 7},
        responses.ResponseFunctionToolCall,
        {"type": "function_call", "name": "find", "namespace": "crm", "arguments": '{"id": 7}'},
    ),
    (
        "crm__note",
        {"input": "hi"},
        responses.ResponseCustomToolCall,
        {"type": "custom_tool_call", "name": "note", "namespace": "crm", "input": "hi"},
    ),
    (
        "find",
        {"id": 7},
        responses.ResponseFunctionToolCall,
        {"type": "function_call", "name": "find", "arguments": '{"id": 7}'},
    ),
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        responses.response_output_item.LocalShellCall,
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}},
    ),
    (
        "shell",
        {"commands": ["ls", "pwd"]},
        responses.ResponseFunctionShellToolCall,
        {"type": "shell_call", "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
    ),
    (
        "apply_patch",
        {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
        responses.ResponseApplyPatchToolCall,
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}},
    ),
]


@pytest.fixture(scope="session")
def served_model(model_dir: Path) -> ServedModel:
    """Of more positions: tools take many."""
    return dataclasses.replace(served(model_dir), max_model_len=4096)


@pytest.fixture
def say_call(client: Any, served_model: Any) -> Callable[[str, dict[str, Any]], None]:
    def script(name: str, arguments: dict[str, Any]) -> None:
        text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        client.script = lambda request: served_model.tokenizer.encode(text, False)

    return script


def prompt_of(client: Any, served_model: Any) -> str:
    return str(served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False))


@pytest.mark.parametrize(("name", "arguments", "kind", "expected"), CALLS, ids=[name for name, *_ in CALLS])
def test_a_call_is_an_item_of_its_tool_s_type(
    sdk: openai.OpenAI,
    http: httpx.Client,
    say_call: Callable[[str, dict[str, Any]], None],
    name: str,
    arguments: dict[str, Any],
    kind: type[Any],
    expected: dict[str, Any],
) -> None:
    say_call(name, arguments)
    whole = sdk.responses.create(model="m", input="hi", tools=TOOLS, max_output_tokens=200)  # type: ignore[arg-type]
    (item,) = whole.output
    assert type(item) is kind
    shown = item.to_dict()
    assert {key: shown.get(key) for key in expected} == expected
    assert "namespace" in expected or "namespace" not in shown
    body = {"model": "m", "input": "hi", "tools": TOOLS, "stream": True, "max_output_tokens": 200}
    blocks = http.post("/v1/responses", json=body).text.strip().split("\n\n")
    events = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
    for event in events:
        EVENT.validate_python(event)
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [{key: event["item"].get(key) for key in expected} for event in done] == [expected]
    assert events[-1]["response"]["output"] == [done[0]["item"]]


@pytest.mark.parametrize("name", ["local_shell", "shell", "apply_patch"])
def test_a_call_that_is_cut_or_wrong_is_an_item_still(name: str) -> None:
    """Of the SDK's types, and one that may come back: else the response could not be continued."""
    (called,) = (args for tool, args, _, _ in CALLS if tool == name)
    text, form = json.dumps(called), call_forms([TOOL.validate_python({"type": name})])[name]
    wrong = [dict.fromkeys(called, value) for value in (None, -1, 2.5, True, "x", [1], {"a": 1}, 1 << 60)]
    for written in (*(text[:i] for i in range(len(text) + 1)), *map(json.dumps, wrong)):
        status = form.status("incomplete")
        item = {"id": f"{form.prefix}_1", "status": status, **form.fields("call_1", written)}
        OUTPUT.validate_python(item)
        assert INPUT.validate_python(item).is_cut


@pytest.mark.parametrize(("name", "arguments", "kind", "expected"), CALLS, ids=[name for name, *_ in CALLS])
def test_a_call_and_its_result_go_back(
    sdk: openai.OpenAI,
    client: Any,
    served_model: Any,
    say_call: Callable[[str, dict[str, Any]], None],
    name: str,
    arguments: dict[str, Any],
    kind: type[Any],
    expected: dict[str, Any],
) -> None:
    say_call(name, arguments)
    first = sdk.responses.create(model="m", input="hi", tools=TOOLS, max_output_tokens=200)  # type: ignore[arg-type]
    item: Any = first.output[0]
    result: dict[str, Any] = {"type": f"{expected['type']}_output", "call_id": item.call_id, "output": "it is done"}
    if expected["type"] == "shell_call":
        outcome = {"type": "exit", "exit_code": 3}
        result["output"] = [{"stdout": "it is done", "stderr": "", "outcome": outcome}]
    if expected["type"] == "local_shell_call":
        result["id"] = result.pop("call_id")
    if expected["type"] == "apply_patch_call":
        result["status"] = "completed"
    given: Any = [{"role": "user", "content": "hi"}, item.to_dict(), result]
    sdk.responses.create(model="m", input=given, tools=TOOLS, store=False, max_output_tokens=200)  # type: ignore[arg-type]
    sent = prompt_of(client, served_model)
    assert f'"name": "{name}"' in sent.rpartition("<|im_start|>assistant\n")[0].rpartition("<|im_start|>assistant\n")[2]
    assert "it is done" in sent
    assert ("[exit code 3]" in sent) == (expected["type"] == "shell_call")
    kept: Any = [result]
    sdk.responses.create(model="m", input=kept, previous_response_id=first.id, tools=TOOLS)  # type: ignore[arg-type]
    assert prompt_of(client, served_model) == sent


def test_codex_s_first_request_is_answered(http: httpx.Client, client: Any, served_model: Any) -> None:
    """Its fields and tools as it sends them."""
    agent = {"type": "function", "name": "spawn_agent", "strict": False, "parameters": {"type": "object"}}
    body = {
        "model": "m",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "text"},
            },
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [agent]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198",
        "client_metadata": {"x-codex-installation-id": "i"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 4,
    }
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "response.completed" in answer.text or "response.incomplete" in answer.text
    prompt = prompt_of(client, served_model)
    assert "multi_agent_v1__spawn_agent" in prompt
    assert "Agents." in prompt
    assert "web_search" not in prompt


def test_a_tool_may_be_chosen(http: httpx.Client, client: Any) -> None:
    for choice, name in (
        ({"type": "function", "name": "find"}, "find"),
        ({"type": "function", "name": "find", "namespace": "crm"}, "crm__find"),
        ({"type": "custom", "name": "note"}, "crm__note"),
        ({"type": "apply_patch"}, "apply_patch"),
        ({"type": "shell"}, "shell"),
    ):
        body = {"input": "hi", "tools": TOOLS, "tool_choice": choice, "store": False, "max_output_tokens": 4}
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        asked = str(client.requests[-1].sampling.structured_outputs)
        named = [known for known, *_ in CALLS if f'": "{known}"' in asked.replace("\\", "")]
        assert named == [name], asked
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}
    body = {"input": "hi", "tools": TOOLS, "tool_choice": allowed, "store": False, "max_output_tokens": 4}
    assert http.post("/v1/responses", json=body).status_code == 200
    for wrong in ({"type": "function", "name": "note"}, {"type": "local_shell"}, {"type": "custom", "name": "find"}):
        answer = http.post("/v1/responses", json={"input": "hi", "tools": TOOLS[:2], "tool_choice": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice.name")


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "namespace", "name": "n", "tools": []}, "tools"),
        ({"type": "namespace", "name": "n" * 100, "tools": [{"type": "function", "name": "f" * 30}]}, "126"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}, "shell"),
        ({"type": "shell", "environment": {"type": "container_auto"}}, "local"),
        ({"type": "code_interpreter", "container": {"type": "auto"}}, "runs at OpenAI"),
    ],
)
def test_what_cannot_be_is_refused(http: httpx.Client, tool: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/responses", json={"input": "hi", "tools": [tool]})
    assert answer.status_code == 400
    assert words in answer.text


def test_each_type_of_the_sdk_is_read_ignored_or_refused() -> None:
    """By the installed SDK's own list."""
    for kind in get_args(tool_param.ToolParam):
        tags = get_args(typing_extensions.get_type_hints(kind)["type"])
        for tag in tags:
            if tag in IGNORED_TOOLS or tag in REFUSED_TOOLS:
                continue
            tools = [{"type": "function", "name": "f"}]
            tool = (
                {"type": tag, "name": "f", "tools": tools}
                if tag in ("function", "custom", "namespace")
                else {"type": tag}
            )
            if tag in ("function", "custom"):
                tool.pop("tools")
            assert TOOL.validate_python(tool).type == tag
