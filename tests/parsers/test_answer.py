"""Which parsers a model's answers get, what stays visible to them, and how calls go back into a template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.api.chat.messages import ChatMessage
from app.api.generation.served_models import load_served_model
from app.config.model import ModelConfig
from app.deployments.serve.serve_args import parse_args
from app.errors import ConfigError, UnsupportedError
from app.parser_tables import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser_name,
    tool_parser_name,
)
from app.parsers.answer import ToolOptions, plan_parsers
from app.parsers.base import ParsedAnswer
from app.structured.reasoning import ReasoningSpan
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer

MARKS = {
    "hermes": "Answer within <tool_call></tool_call>.",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=one>",
    "mistral": "{{- '[TOOL_CALLS] [' }}",
    "deepseek_v3": "'<｜tool▁sep｜>' + name + '\\n' + '```json'",
    "deepseek_v31": "name + '<｜tool▁sep｜>' + arguments",
    "pythonic": "[func_name1(param1=value1, param2=value2), func_name2(...)]",
    "llama3_json": "<|python_tag|>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=k>v</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>',
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "harmony": "<|start|>assistant to=functions.x<|channel|>commentary",
}
WORDS: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "now"}}


def test_templates_name_their_parsers() -> None:
    assert {name: tool_parser_name(text) for name, text in MARKS.items()} == {name: name for name in MARKS}
    assert tool_parser_name("'<|tool_call_start|>[' + name + '('") == "pythonic"
    assert set(MARKS) == set(TOOL_PARSERS)
    reasoning = {"'</think>'": "think", "[/THINK]": "mistral", "<|channel|>": "harmony", "</seed:think>": "seed_oss"}
    assert {text: reasoning_parser_name(text) for text in (*reasoning, "")} == {**reasoning, "": None}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n<invoke name="f"></invoke></tool_call>',
        "within <tool_call></tool_call>: <tool_calls>[{...}]</tool_calls>",
        "<function=f>{}</function> or <|python_tag|>",
    ],
)
def test_forms_that_only_look_alike_have_no_parser(text: str) -> None:
    """Others with <invoke>, Apriel, Functionary: a wrong parser would give their calls as content."""
    assert tool_parser_name(text) is None


def test_unknown_names_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match=r"args\.models\.0\.tool_parser: unknown tool parser 'herms'; .* hermes\?"):
        parse_args({"models": [{"name": "m", "tool_parser": "herms"}]})
    with pytest.raises(ConfigError, match=r"unknown reasoning parser 'mine'; known: auto, none, think"):
        parse_args({"models": [{"name": "m", "reasoning_parser": "mine"}]})


def test_options_choose_the_parsers() -> None:
    tool_options = ToolOptions({"now": {"type": "object"}})
    auto = load_served_model(ModelConfig(name="m"))
    plan = plan_parsers(auto, [1, 2, 3], tool_options)
    assert (plan.tools, plan.reasoning) == (TOOL_PARSERS.load("hermes"), REASONING_PARSERS.load("think"))
    none = load_served_model(ModelConfig(name="m", tool_parser="none", reasoning_parser="none"))
    assert plan_parsers(none, [1, 2, 3]).is_plain
    with pytest.raises(UnsupportedError) as caught:
        plan_parsers(none, [1, 2, 3], tool_options)
    assert caught.value.param == "tools"
    assert "started with tool_parser=none; start it with --tool-parser and one of deepseek_v3" in str(caught.value)
    bare = load_served_model(ModelConfig(name="m"))
    bare.chat_template = ChatTemplate({"default": "{{ messages }}"}, {})
    with pytest.raises(UnsupportedError, match=r"tools: .* its chat template is of no known format; .* --tool-parser"):
        plan_parsers(bare, [1, 2, 3], tool_options)
    own = load_served_model(ModelConfig(name="m", tool_parser="mistral", reasoning_parser="mistral"))
    plan = plan_parsers(own, [1, 2, 3], tool_options)
    assert (plan.tools, plan.reasoning) == (TOOL_PARSERS.load("mistral"), REASONING_PARSERS.load("mistral"))
    assert len(plan.new_call_id()) == 9
    assert plan.new_call_id().isalnum()


@pytest.mark.parametrize(
    ("name", "prompt_end", "continued", "inside"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", None, True),
        ("think", "<|im_start|>assistant\n", None, False),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        ("think", "Let me", "<think>\nLet me", True),
        ("think", "Well", "<think>\nLet me</think>Well", False),
        ("deepseek_r1", "<｜Assistant｜>", None, True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", None, True),
        ("deepseek_r1", "<think>\n\n</think>\n\n", None, False),
        ("deepseek_r1", "The answer", "The answer", False),
        ("mistral", "[/INST]", None, False),
        ("harmony", "<|start|>assistant", None, False),
    ],
)
def test_where_an_answer_begins(name: str, prompt_end: str, continued: str | None, inside: bool) -> None:
    assert REASONING_PARSERS.load(name).starts_inside(prompt_end, continued) == inside


@pytest.mark.parametrize(
    ("name", "prompt_end", "continued", "opening"),
    [
        ("think", "<|im_start|>assistant\n", None, "<think>"),  # Qwen3, which opens its reasoning itself
        ("think", "<|im_start|>assistant\n<think>\n", None, ""),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, ""),  # thinking is off
        ("think", "</think>Hi<|im_end|>\n<|im_start|>assistant\n", None, "<think>"),  # the turn before's
        ("think", "Well", "Well", ""),
        ("deepseek_r1", "<｜Assistant｜>", None, ""),
        ("mistral", "[/INST]", None, "[THINK]"),
        ("harmony", "<|start|>assistant", None, ""),
    ],
)
def test_where_the_answer_may_open_its_reasoning(
    name: str, prompt_end: str, continued: str | None, opening: str
) -> None:
    assert REASONING_PARSERS.load(name).may_open(prompt_end, continued) == opening


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("so\n</think>\n\nDone.\n", "so", "Done.\n"),
        ("<think>\nso\n\nand so\n</think>Done.", "so\n\nand so", "Done."),
        ("</think>\n\nDone.", "", "Done."),
        ("never closed </thin", "never closed </thin", ""),
        ("\n\n  indented\n</think> x", "  indented", " x"),
    ],
)
def test_inside_the_reasoning(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        parser, answer = REASONING_PARSERS.load("think")(inside=True), ParsedAnswer()
        for piece in pieces:
            answer.add(parser.push(piece))
        answer.add(parser.flush())
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_reasoning_only_begins_an_answer() -> None:
    parser, answer = REASONING_PARSERS.load("think")(), ParsedAnswer()
    text = "The tag <think> opens, </think> closes."
    answer.add(parser.push(text) + parser.flush())
    assert (answer.reasoning, answer.content) == ("", text)


@pytest.fixture
def harmony(
    write_model_dir: Callable[..., Path], serve_model: Any, make_client: Any, serve: Any, tmp_path: Path
) -> tuple[Any, str]:
    """A served model whose tokenizer calls all markers of its form special."""
    path = write_model_dir(tmp_path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = list(TOOL_PARSERS.load("harmony").markers)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    model = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**model, "vocab_size": model["vocab_size"] + 7}))
    client = make_client(serve_model(path, tool_parser="harmony", reasoning_parser="harmony"))
    return client, serve(client).url


def test_markers_that_are_special_tokens(harmony: tuple[Any, str]) -> None:
    """The parser sees its markers; the client sees neither them nor other special tokens."""
    client, url = harmony
    tokenizer = client.models["m"].tokenizer
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        '<|constrain|>json<|message|>{"a": <|im_start|>1}<|call|>'
    )
    client.script = lambda request: tokenizer.encode(text, add_special_tokens=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        whole = sdk.chat.completions.create(model="m", messages=WORDS, tools=[TOOL]).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        assert (whole.message.model_extra or {})["reasoning"] == "Hm."
        assert whole.message.tool_calls
        call = whole.message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("now", '{"a": 1}')
        plain = sdk.chat.completions.create(model="m", messages=WORDS).choices[0]
        assert plain.message.content == '{"a": 1}', "a call that nobody offered is what the model says"
        required = sdk.chat.completions.create(model="m", messages=WORDS, tools=[TOOL], tool_choice="required")
        assert required.choices[0].finish_reason == "tool_calls"
    grammar = client.requests[-1].sampling.structured_outputs.grammar
    ids = {marker: tokenizer.token_to_id(marker) for marker in TOOL_PARSERS.load("harmony").markers}
    assert f'<[{ids["<|channel|>"]}]> "commentary to=functions.now " <[{ids["<|constrain|>"]}]> "json"' in grammar
    assert client.requests[-1].asked(ReasoningSpan) is None
    form = {"type": "json_object"}
    httpx.post(f"{url}/v1/chat/completions", json={"messages": WORDS, "response_format": form})
    final = tokenizer.encode("<|channel|>final<|message|>", add_special_tokens=False)
    assert client.requests[-1].asked(ReasoningSpan) == ReasoningSpan(tuple(final))


@pytest.mark.parametrize("arguments", ['{"b": 1, "a": "ü"}', {"b": 1, "a": "ü"}])
def test_arguments_in_templates(arguments: Any) -> None:
    """Published templates add them to a text, print them, walk through them or write them as JSON."""
    source = (
        "{%- set f = messages[0].tool_calls[0].function %}{{- 'x' + f.arguments + 'y' }}|{{ f.arguments }}|"
        "{{- f.arguments | tojson }}|{% for k, v in f.arguments | items %}{{ k }}={{ v }};{% endfor %}|"
        "{{- f.arguments is mapping }}|{{ f.arguments is string }}"
    )
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call], "reasoning_content": "t"})
    turn = message.for_template()
    text = '{"b": 1, "a": "ü"}'
    expected = f"x{text}y|{text}|{text}|b=1;a=ü;|True|False"
    assert ChatTemplate({"default": source}, {}).render([turn], add_generation_prompt=False) == expected
    assert turn["reasoning"] == turn["reasoning_content"] == turn["thinking"] == "t"
    assert turn["content"] == ""


def test_gpt_oss_takes_reasoning_or_a_text_beside_calls() -> None:
    turn = {"role": "assistant", "reasoning": "t", "content": "c"}
    assert ChatMessage.model_validate(turn).for_template()["thinking"] == "t"
    call = {"id": "c", "function": {"name": "f"}}
    assert "thinking" not in ChatMessage.model_validate({**turn, "tool_calls": [call]}).for_template()


def test_what_a_model_tells_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_served_model(ModelConfig(name="m"))
    asked: list[str] = []

    def token_to_id(self: Tokenizer, token: str) -> int | None:
        asked.append(token)
        return found(self, token)

    found = Tokenizer.token_to_id
    monkeypatch.setattr(Tokenizer, "token_to_id", token_to_id)
    plans = [plan_parsers(model, [1, 2, 3], ToolOptions({"now": {"type": "object"}})) for _ in range(2)]
    assert plans[0] == plans[1]
    assert len(asked) == len(set(asked)) > 0
    other = load_served_model(ModelConfig(name="m", reasoning_parser="none"))
    assert plan_parsers(other, [1, 2, 3]).reasoning is None
