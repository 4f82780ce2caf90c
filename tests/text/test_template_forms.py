"""Every construct that published chat templates are made of, rendered as transformers renders it.

The templates of the models are not ours to keep, so CI meets their forms: each template here is written for one
construct of theirs, in their manner, and transformers is the judge of what it means. The published files themselves are
tried by tests/parsers/test_published.py, where PUBLISHED_TEMPLATES names a folder of them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template  # type: ignore[import-untyped]

from app.api.chat.messages import ChatMessage
from app.errors import InvalidRequestError
from app.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <warm> & é.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"], "enum": [1, 2]}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": 'Köln "x" <b>', "days": 2, "list": [1, {"a": None}], "yes": True}
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
USER = {"role": "user", "content": "  Hi & <there>.\n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes."}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    "calls": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call67890"}]},
        {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "warm"},
        {"role": "tool", "tool_call_id": "call67890", "name": "weather", "content": '{"t": 3}'},
    ],
    "reasoning": [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.\nSo."}, USER],
}
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"

FORMS = {
    "arguments_as_an_object": """
{%- for m in messages %}{%- for call in m.tool_calls or [] %}
<call>{{ call.function.name }}{% for key, value in call.function.arguments | items %}
<{{ key }}>{{ value | tojson if value is mapping or value is sequence and value is not string else value }}{% endfor %}
{%- endfor %}{% endfor %}""",
    "arguments_as_json": """
{%- for m in messages if m.tool_calls is defined %}{% for call in m['tool_calls'] %}
{%- set call = call.function if call.function else call %}
{"name": "{{ call.name }}", "arguments":
{{- " " }}{{ call.arguments if call.arguments is string else call.arguments | tojson }}}
{%- endfor %}{% endfor %}""",
    "arguments_added_to_text": """
{%- for m in messages %}{%- for call in m.tool_calls or [] %}
{{- '<｜call｜>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```' }}
{%- endfor %}{% endfor %}""",
    "namespaces": """
{%- set ns = namespace(first=true, system='', index=-1, is_tool=false) %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}
{%- else %}{% set ns.index = loop.index0 %}{% set ns.is_tool = m.role == 'tool' %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}|{{ ns.index }}|{{ ns.is_tool }}|{{ ns.first }}""",
    "loops": """
{%- for m in messages[::-1] %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}
{{- loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if loop.nextitem is defined }}{% endfor %}
{%- for m in messages[1:] %}{{ m.role }}{% else %}none{% endfor %}{{ messages[-1].role }}{{ messages | length }}""",
    "loop_controls": """
{%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}
{%- if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}""",
    "generation": """
{%- for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}""",
    "macros": """
{%- macro kind(spec, depth=0) -%}
{%- if spec.type is string %}{{ spec.type }}{% elif spec.type is iterable %}{{ spec.type | join(' | ') }}{% endif %}
{%- if spec.enum %} = {{ spec.enum | map('string') | join('/') }}{% endif %}
{%- for name, inner in (spec.properties or {}) | dictsort %}
{{ '  ' * depth }}{{ name }}{{ '?' if name not in spec.required }}: {{ kind(inner, depth + 1) }}{% endfor %}
{%- endmacro %}
{%- for tool in tools or [] %}{{ tool.function.name }} {{ kind(tool.function.parameters) }}{% endfor %}""",
    "json_filters": """
{%- for tool in tools or [] %}{{ tool | tojson }}{{ tool | tojson(indent=4) }}
{{- tool.function | tojson(ensure_ascii=False) }}
{%- endfor %}{{ messages[0].content | string | tojson }}""",
    "strings": """
{%- for m in messages %}{% set text = m.content if m.content is string else '' %}
{{- text.strip() }}|{{ text.rstrip('\\n').lstrip() }}|{{ text.split('&')[-1] }}|{{ text.startswith('  ') }}
{{- text | trim | upper }}
{{- text.replace('<', '[') }}|{{ text[:4] }}|{{ '</think>' in text }}
{{- text | length }}|{{ text | replace('H', 'J') | title }}
{% endfor %}""",
    "reasoning": """
{%- for m in messages %}{% if m.reasoning_content is defined and m.reasoning_content is not none %}
{{- '<think>\\n' ~ m.reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}
{{- '<think></think>' }}{% endif %}{% endif %}""",
    "parts": """
{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for part in m.content %}
{%- if part['type'] == 'text' %}[{{ part['text'] }}]{% elif 'image' in part %}<image>{% endif %}{% endfor %}{% endif %}
{%- endfor %}""",
    "parts_or_none": """
{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}
{%- if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}{% endif %}{% endfor %}""",
    "parts_selected": """
{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m['content'] | selectattr('type', 'equalto', 'text') %}[{{ part['text'] }}]{% endfor %}{% endif %}
{%- endfor %}""",
    "selections": """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{- users | length }}{{ (messages | first).role }}{{ (messages | last).role }}
{{- messages | map(attribute='role') | join(',') }}
{{- messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | list | tojson }}
{{- tools is defined }}{{ tools is none }}{{ documents is none }}{{ nobody is defined }}{{ nobody | default('x') }}""",
    "strftime": "{{ strftime_now('%Y') }}" + TURNS,
    "white_space": """{% if messages[0].role == 'system' %}
    {% set system = messages[0].content %}
{% endif %}
    {%+ if system is defined %}S{{ system }}{% endif %}
    {# a comment #}
{% for m in messages %}
  {{ m.role }}
{% endfor %}
{%- if add_generation_prompt -%}
    <|assistant|>
{%- endif -%}
""",
    "refusals": """
{%- if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('not this turn') }}{% endif %}{{ m.content | trim }}{% endfor %}""",
    "call_ids": """
{%- for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}
{{- raise_exception('an id of another length') }}{% endif %}{{ call.id }}{% endfor %}
{%- if m.role == 'tool' %}{{ m.tool_call_id }}{{ m.name }}{{ m.content }}{% endif %}{% endfor %}""",
}

WALKS_PARTS = ("parts", "parts_or_none", "parts_selected")


def judged(form: str, chat: list[dict[str, Any]], options: dict[str, Any]) -> set[str]:
    """What transformers makes of it, for call arguments as objects and as text, and no content as none and as "".

    Parts of text are one text for every template that does not walk through them.
    """
    found = set()
    for as_object in (True, False):
        for nothing in (None, ""):
            turns = []
            for turn in chat:
                arguments = ARGUMENTS if as_object else json.dumps(ARGUMENTS)
                calls = [
                    {**call, "function": {"name": "weather", "arguments": arguments}}
                    for call in turn.get("tool_calls", ())
                ]
                content = nothing if turn["content"] is None else turn["content"]
                if isinstance(content, list) and form not in WALKS_PARTS:
                    content = "\n".join(part["text"] for part in content)
                turns.append({**turn, "content": content, **({"tool_calls": calls} if calls else {})})
            try:
                found.add(render_jinja_template([turns], chat_template=FORMS[form], **options, **SPECIAL)[0][0])
            except Exception as error:  # a template's refusal, or text added to an object
                found.add(f"refused: {error}")
    return found


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("form", FORMS)
def test_rendered_as_transformers_does(form: str, chat: str) -> None:
    source = FORMS[form]
    messages = [ChatMessage.model_validate(turn).for_template() for turn in CHATS[chat]]
    template = ChatTemplate({"default": source}, SPECIAL)
    for tools in (None, TOOLS):
        for opens in (True, False):
            try:
                ours = template.render(messages, tools=tools, add_generation_prompt=opens)
            except InvalidRequestError as error:
                ours = "refused: " + error.message.removeprefix("the chat template refuses this conversation: ")
            options = {"tools": tools, "add_generation_prompt": opens, "documents": None}
            assert ours in judged(form, CHATS[chat], options)
            assert '{\\"city' not in ours, "JSON inside a string"


def test_the_forms_are_not_empty() -> None:
    """Each form says something of some conversation, and refusals do refuse."""
    said = {
        form: [
            ChatTemplate({"default": source}, SPECIAL).render(
                [ChatMessage.model_validate(turn).for_template() for turn in CHATS[chat]], tools=TOOLS
            )
            for chat in ("plain", "calls")
            if form != "refusals"
        ]
        for form, source in FORMS.items()
    }
    assert all(any(text.strip() for text in texts) for form, texts in said.items() if form != "refusals")
    with pytest.raises(InvalidRequestError, match="no system messages here"):
        ChatTemplate({"default": FORMS["refusals"]}, SPECIAL).render(CHATS["system"])
