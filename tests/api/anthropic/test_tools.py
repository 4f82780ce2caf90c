"""Anthropic's client-side tools: the model sees their schema by name and version, the client runs their calls."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import anthropic
import httpx
import pytest
import typing_extensions
from anthropic.types import tool_union_param
from anthropic.types.beta import beta_tool_union_param

from app.api.anthropic.protocol import CountTokensRequest
from app.api.anthropic.tools import CLIENT_TOOLS, REFUSED_TOOLS
from app.errors import UnsupportedError
from app.text.served_model import ServedModel
from tests.api.conftest import served

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="session")
def served_model(model_dir: Path) -> ServedModel:
    """Of more positions: tools take many."""
    return dataclasses.replace(served(model_dir), max_model_len=4096)


def say(client: Any, served_model: Any, text: str) -> None:
    client.script = lambda request: served_model.tokenizer.encode(text, False)


@pytest.mark.parametrize("kind", sorted(CLIENT_TOOLS))
def test_the_model_sees_the_schema_and_the_client_the_call(
    claude: anthropic.Anthropic, client: Any, served_model: Any, kind: str
) -> None:
    name, description, schema = CLIENT_TOOLS[kind]
    arguments = {"command": "ls"} if name == "bash" else {"command": "view", "path": "/memories/a"}
    say(client, served_model, f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
    tool: Any = {"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}
    message = claude.beta.messages.create(model="m", max_tokens=300, messages=HI, tools=[tool])
    assert message.stop_reason == "tool_use"
    assert message.content[0].to_dict()["input"] == arguments
    assert message.content[0].to_dict()["name"] == name
    prompt = served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False)
    assert description in prompt
    for field in schema["properties"]:
        assert f'"{field}"' in prompt
    counted = claude.beta.messages.count_tokens(model="m", messages=HI, tools=[tool])
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_the_sdk_s_memory_tool_runs_what_the_schema_allows(tmp_path: Path) -> None:
    """Each command of our schema is one that the SDK's own tool takes, with fields of the same names."""
    from anthropic.types.beta import beta_memory_tool_20250818_command as commands

    schema = CLIENT_TOOLS["memory_20250818"][2]["properties"]
    kinds = get_args(get_args(commands.BetaMemoryTool20250818Command)[0])
    named = {get_args(kind.model_fields["command"].annotation)[0]: set(kind.model_fields) for kind in kinds}
    assert set(schema["command"]["enum"]) == set(named)
    assert set(schema) == {name for fields in named.values() for name in fields}


def test_examples_are_shown(claude: anthropic.Anthropic, client: Any, served_model: Any) -> None:
    tool: Any = {
        "name": "add",
        "description": "Adds.",
        "input_schema": {"type": "object"},
        "input_examples": [{"a": 1}],
    }
    claude.messages.create(model="m", max_tokens=5, messages=HI, tools=[tool])
    prompt = served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False)
    assert "Adds." in prompt
    assert "Example of its input: " in prompt


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "runs at Anthropic"),
        ({"type": "computer_20250124", "name": "computer", "display_width_px": 1}, "a model that sees"),
        ({"type": "bash_20990101", "name": "bash"}, "known: custom, bash_20241022"),
        ({"type": "bash_20250124", "name": "zsh"}, "is called 'bash'"),
        ({"name": "f", "input_schema": {}, "allowed_callers": ["code_execution_20250825"]}, "allowed_callers"),
    ],
)
def test_others_are_refused_by_name(http: httpx.Client, tool: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/messages", json={"model": "m", "max_tokens": 5, "messages": HI, "tools": [tool]})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def read(tag: str) -> CountTokensRequest:
    return CountTokensRequest.model_validate({"model": "m", "messages": HI, "tools": [{"type": tag}]})


def test_each_type_of_the_sdk_is_known() -> None:
    """By the installed SDK's own lists."""
    unions = tool_union_param.ToolUnionParam, beta_tool_union_param.BetaToolUnionParam
    for kind in {kind for union in unions for kind in get_args(union)}:
        for tag in get_args(typing_extensions.get_type_hints(kind).get("type")):
            if not isinstance(tag, str) or tag == "custom":
                continue
            if tag in CLIENT_TOOLS:
                (tool,) = read(tag).tools or ()
                assert tool.type == tag
                continue
            assert any(tag.startswith(prefix) for prefix in REFUSED_TOOLS), tag
            with pytest.raises(UnsupportedError, match=r"runs at Anthropic|a model that sees"):
                read(tag)
