# ruff: noqa: E501 (long literals)
"""The chat template (Jinja, as shipped) and the same rendering in Python, split into (text, is_target) pieces for training.

ChatML turns; tools and calls in the Hermes form; `enable_thinking` opens a thought in the generation prompt.
`tests/tools/tiny_chat` checks that both renderings agree.
"""

from __future__ import annotations

import json
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
]

TOOLS_HEAD = "You may call these functions:\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\nTo call one, write:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    r"""
{%- set ns = namespace(last_user=-1, start=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is none or content is undefined -%}
{%- else -%}{%- for part in content -%}{%- if part is string -%}{{- part -}}{%- elif part.text is defined -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if messages and messages[0].role in ['system', 'developer'] %}{% set ns.start = 1 %}{% endif %}
{%- if tools or ns.start == 1 %}
{{- '<|im_start|>system\n' }}
{%- if ns.start == 1 %}{{- text(messages[0].content) }}{% if tools %}{{- '\n\n' }}{% endif %}{% endif %}
{%- if tools %}
{{- """
    + json.dumps(TOOLS_HEAD)
    + r""" }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
{{- """
    + json.dumps(TOOLS_TAIL)
    + r""" }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages[ns.start:] %}
{%- set i = loop.index0 + ns.start %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- set body = text(m.content) %}
{%- set thought = m.reasoning_content if m.reasoning_content is defined and m.reasoning_content else (m.reasoning if m.reasoning is defined and m.reasoning else '') %}
{%- if '</think>' in body %}
{%- if not thought %}{% set thought = body.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}
{%- set body = body.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if thought and i > ns.last_user %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- body }}
{%- if m.tool_calls is defined and m.tool_calls %}
{%- for call in m.tool_calls %}
{%- if call.function is defined %}{% set call = call.function %}{% endif %}
{%- if body or not loop.first %}{{- '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{% else %}{{- call.arguments | tojson }}{% endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>tool\n<tool_response>\n' + text(m.content) + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'developer' %}
{{- '<|im_start|>system\n' + text(m.content) + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + text(m.content) + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\n' }}{% endif %}
{%- endif %}
"""
).strip()


def answer_text(message: dict[str, Any]) -> str:
    """What the model writes for an assistant message, its thought not counted."""
    out = str(message.get("content") or "")
    for call in message.get("tool_calls") or []:
        fn = call["function"]
        out += (
            ("\n" if out else "")
            + f'<tool_call>\n{{"name": "{fn["name"]}", "arguments": {json.dumps(fn["arguments"], ensure_ascii=False)}}}\n</tool_call>'
        )
    return out


def pieces(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, open_think: bool = True
) -> list[tuple[str, bool]]:
    """A conversation as (text, is_target); the last turn's thought is opened by the prompt unless open_think is False."""
    out: list[tuple[str, bool]] = []
    rest = messages
    head = ""
    if messages and messages[0]["role"] == "system":
        head, rest = messages[0]["content"], messages[1:]
    if tools:
        head += ("\n\n" if rest is not messages else "") + TOOLS_HEAD
        head += "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools) + TOOLS_TAIL
    if head or rest is not messages:
        out.append((f"<|im_start|>system\n{head}<|im_end|>\n", False))
    last_user = max((i for i, m in enumerate(rest) if m["role"] == "user"), default=-1)
    for i, m in enumerate(rest):
        if m["role"] == "assistant":
            body = answer_text(m)
            prompt = "<|im_start|>assistant\n"
            thought = m.get("reasoning_content")
            if thought and i > last_user:
                body = f"{thought}\n</think>\n\n{body}"
                if open_think:
                    prompt += "<think>\n"
                else:
                    body = "<think>\n" + body
            out += [(prompt, False), (body + "<|im_end|>", True), ("\n", False)]
        elif m["role"] == "tool":
            out.append((f"<|im_start|>tool\n<tool_response>\n{m['content']}\n</tool_response><|im_end|>\n", False))
        else:
            out.append((f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False))
    return out
