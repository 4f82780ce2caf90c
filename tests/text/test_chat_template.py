"""ChatTemplate against transformers' apply_chat_template."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ASSETS
from app.errors import CheckpointError, ConfigError, InvalidRequestError
from app.text.chat_template import ChatTemplate, RenderLimits, StuckTemplateError

CHATML = """{% for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

LLAMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}{% else %}{% set system = none %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- if m['role'] == 'user' %}[INST] {{ system + '\\n' if loop.first and system else '' }}{{ m['content'] }} [/INST]
{%- else %} {% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""

TOOLS = """{%- if tools is not none %}{{ tools | tojson(indent=2) }}|{{ tools[0] | tojson(separators=(',', ':')) }}
{% endif %}{{ date | default('none') }} {{ flag | default(true) }}
{%- for m in messages %}
{%- if m.tool_calls is defined and m.tool_calls %}
{{ '<call>' }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}
{%- if loop.last %}{% break %}{% endif %}{% endfor %}
{%- else %}
{{ m.role }}: {{ m.content }}
{%- endif %}{% endfor %}
{%- if documents %}{% for d in documents %}[{{ d.title }}] {{ d.text }}{% endfor %}{% endif %}"""

PARTS = """{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message['content'] %}{% if part.type == 'text' %}{{ part.text }}|{% endif %}{% endfor %}
{%- endif %}</{{ message.role }}>{% endfor %}{{ strftime_now('%Y') }}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "größe",
        "description": "<b>&'\" 🙂",
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}},
    },
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": "  Hi & <b>there</b> 🙂 "}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2 "},
        {"role": "user", "content": "日本"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nok"},
    ],
    "calls": [
        {"role": "user", "content": "call"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": "ä", "y": [1, 2.5, None]}}}
            ],
        },
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "so?"},
    ],
}


@pytest.fixture(scope="session")
def models(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for each template, and the built-in model."""
    found = {"tiny-chat": ASSETS / "tiny-chat"}
    for name, source in {"chatml": CHATML, "llama": LLAMA, "tools": TOOLS, "parts": PARTS}.items():
        found[name] = tmp_path_factory.mktemp(name)
        for file in directories["byte_level"].iterdir():
            (found[name] / file.name).write_bytes(file.read_bytes())
        (found[name] / "chat_template.jinja").write_text(source)
    return found


def theirs(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("model", ["tiny-chat", "chatml", "llama", "tools", "parts"])
def test_equals_transformers(model: str, models: dict[str, Path]) -> None:
    ours, reference = ChatTemplate.from_directory(models[model]), theirs(models[model])
    refused = compared = 0
    for chat in CHATS.values():
        for tools in (None, [TOOL]):
            for options in ({}, {"flag": False, "date": "today", "enable_thinking": True}):
                for generation in (True, False):
                    try:
                        expected = reference.apply_chat_template(
                            chat, tools=tools, add_generation_prompt=generation, tokenize=False, **options
                        )
                    except Exception:
                        refused += 1
                        with pytest.raises(InvalidRequestError):
                            ours.render(
                                chat, tools=tools, add_generation_prompt=generation, chat_template_kwargs=options
                            )
                        continue
                    compared += 1
                    rendered = ours.render(
                        chat, tools=tools, add_generation_prompt=generation, chat_template_kwargs=options
                    )
                    assert rendered == expected
    assert compared >= 16
    assert refused == (8 if model == "llama" else 0)


@pytest.mark.parametrize("model", ["tiny-chat", "chatml", "llama", "tools", "parts"])
def test_continues_the_final_message_as_transformers_does(model: str, models: dict[str, Path]) -> None:
    ours, reference = ChatTemplate.from_directory(models[model]), theirs(models[model])
    for text in ("The answer is", "trailing space "):
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        expected = reference.apply_chat_template(chat, continue_final_message=True, tokenize=False)
        rendered = ours.render(chat, continue_final_message=True, add_generation_prompt=False)
        assert rendered == expected
        assert rendered.rstrip().endswith(text.strip())


def test_documents_equal_transformers(models: dict[str, Path]) -> None:
    documents = [{"title": "T", "text": "some text"}]
    expected = theirs(models["tools"]).apply_chat_template(CHATS["short"], documents=documents, tokenize=False)
    ours = ChatTemplate.from_directory(models["tools"])
    assert ours.render(CHATS["short"], documents=documents, add_generation_prompt=False) == expected


def test_parts_stay_parts_where_the_template_iterates(models: dict[str, Path]) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    ours = ChatTemplate.from_directory(models["parts"])
    assert ours.takes_parts
    assert ours.render(parts) == theirs(models["parts"]).apply_chat_template(parts, tokenize=False)
    plain = ChatTemplate.from_directory(models["chatml"])
    assert not plain.takes_parts
    joined = [{"role": "user", "content": "one\ntwo"}]
    assert plain.render(parts) == plain.render(joined)
    assert ChatTemplate.from_directory(models["tiny-chat"]).takes_parts


CALLS = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("message.content is none", None),
        ("message['role'] == 'assistant' and message['content'] is not none", None),
        ("not (message.content is none)", None),
        ("(message.content is none or message.content == '') and not message.tool_calls", ""),
        ("message.content", ""),
        ("message.name is none", ""),
    ],
)
def test_empty_text_beside_calls_is_what_the_template_asks_for(test: str, expected: str | None) -> None:
    ours = ChatTemplate(
        {
            "default": "{% for message in messages %}{% if "
            + test
            + " %}{% endif %}{{ message.content | tojson }}{% endfor %}"
        },
        {},
    )
    for calls, content in ((CALLS, expected), ([], "")):
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        assert ours.render([turn], add_generation_prompt=False) == json.dumps(content)
    assert ours.render([{"role": "assistant", "content": "x", "tool_calls": CALLS}]) == '"x"'


def test_reasoning_is_parts_where_the_template_reads_such_parts() -> None:
    loop = (
        "{% for part in message.content %}{% if part['type'] == WORD %}({{ part.thinking }}){% else %}{{ part.text }}"
    )
    loop = "{% for message in messages %}" + loop + "{% endif %}{% endfor %}{% endfor %}"
    ours = ChatTemplate({"default": loop.replace("WORD", "'thinking'")}, {})
    text = [{"type": "text", "text": "say"}]
    for content, expected in (("say", "(why)say"), (text, "(why)say"), ("", "(why)")):
        assert ours.render([{"role": "assistant", "content": content, "reasoning": "why"}]) == expected
        assert ours.render([{"role": "assistant", "content": content, "reasoning_content": "why"}]) == expected
    assert ours.render([{"role": "assistant", "content": text}]) == "say"
    assert ours.render([{"role": "user", "content": text, "reasoning": "why"}]) == "say"
    other = ChatTemplate({"default": loop.replace("WORD", "'image'")}, {})
    assert other.render([{"role": "assistant", "content": text, "reasoning": "why"}]) == "say"


def test_strftime_now(models: dict[str, Path]) -> None:
    assert ChatTemplate.from_directory(models["parts"]).render(CHATS["short"]).endswith(str(datetime.now().year))


def test_named_templates(models: dict[str, Path], tmp_path: Path) -> None:
    for file in models["chatml"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, reference = ChatTemplate.from_directory(tmp_path), theirs(tmp_path)
    for tools in (None, [TOOL]):
        expected = reference.apply_chat_template(CHATS["short"], tools=tools, tokenize=False)
        assert ours.render(CHATS["short"], tools=tools) == expected
    # Templates in files of their own come first.
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools from the file")
    ours, reference = ChatTemplate.from_directory(tmp_path), theirs(tmp_path)
    for tools in (None, [TOOL]):
        expected = reference.apply_chat_template(CHATS["short"], tools=tools, tokenize=False)
        assert ours.render(CHATS["short"], tools=tools) == expected


def test_override_file(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own {{ bos_token }}")
    ours = ChatTemplate.from_directory(models["chatml"], override=tmp_path / "own.jinja")
    assert ours.render(CHATS["short"]) == "own <|bos|>"
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jinja"):
        ChatTemplate.from_directory(models["chatml"], override=tmp_path / "none.jinja")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].content.missing.deeper }}", "missing"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_refuses_is_a_bad_request(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatTemplate({"default": source}, {}).render(CHATS["short"])
    assert caught.value.param == "messages"


def test_errors_name_the_field() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(InvalidRequestError) as caught:
        template.render(CHATS["short"], chat_template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"
    with pytest.raises(InvalidRequestError) as caught:
        template.render(CHATS["short"], continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequestError, match="no text to continue"):
        template.render([{"role": "user"}], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(InvalidRequestError, match="does not keep"):
        ChatTemplate({"default": "nothing"}, {}).render(
            CHATS["short"], continue_final_message=True, add_generation_prompt=False
        )
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate({}, {}).render(CHATS["short"])
    with pytest.raises(CheckpointError, match="'default' does not parse"):
        ChatTemplate({"default": "{% if %}"}, {})


@pytest.mark.parametrize("name", ["template", "caps", "values", "args", "context", "environment"])
@pytest.mark.parametrize("continued", [False, True])
def test_any_name_may_be_given_to_a_template(name: str, continued: bool) -> None:
    template = ChatTemplate({"default": "{{ %s }}{{ messages[0].content }}" % name}, {})  # noqa: UP031
    text = template.render(
        [{"role": "user", "content": "x"}],
        chat_template_kwargs={name: 7},
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )
    assert text == "7x"


LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}"
    "{% if a == 300 %}{{ done() }}{% endif %}{% endfor %}"
)


def test_a_template_that_loops_without_writing_is_given_up() -> None:
    """It used to be looked at between what it writes only, so that its thread was lost."""
    came_through: list[bool] = []
    options: dict[str, Any] = {"chat_template_kwargs": {"done": lambda: came_through.append(True)}}
    template = ChatTemplate({"default": LOOPS}, {})
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.1 s") as error:
        template.render([{"role": "user", "content": "hi"}], limits=RenderLimits(max_s=0.1), **options)
    assert error.value.param == "messages"
    with pytest.raises(StuckTemplateError):
        template.render(
            [{"role": "user", "content": "hi"}], limits=RenderLimits(max_s=600.0, max_cpu_s=0.05), **options
        )
    assert not came_through
