"""Holds what the model answers to who asks for a file: a call of the program's tool, the file itself, last words."""

from __future__ import annotations

import json

from tests.e2e.agents.agent_model import start_of

FILE, TEXT, LAST_WORDS = "made.txt", "made through Manta", "The file is there."
ASK, CHAT = f"Make the file {FILE}.", "Say hello."

_CALLS = {  # tools that run a shell's command, by their names, and the field for the command
    "exec_command": "cmd",
    "Bash": "command",
    "bash": "command",
}


def _call(name: str, field: str) -> str:
    arguments = {field: f"echo {TEXT} > {FILE}", "description": f"make {FILE}"}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {name: _call(name, field) for name, field in _CALLS.items()}
ANSWERS["whole file"] = f"{FILE}\n```\n{TEXT}\n```\n"
ANSWERS["last words"] = LAST_WORDS

# The answer to whoever asks for the file: the last words once a tool has answered, else a call of the first tool that
# is known, or without tools the file. Any other gets a random one.
TEMPLATE = """
{%- set found = namespace(asked=false, answer='whole file') %}
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}
  {%- if tool.function.name in names and found.answer == 'whole file' %}
    {%- set found.answer = tool.function.name %}
  {%- endif %}
{%- endfor %}
{{- 'Answer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
  {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
  {%- if message.role == 'user' and ask in message.content %}{% set found.asked = true %}{% endif %}
  {%- if message.role == 'tool' %}{% set found.answer = 'last words' %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
  {%- if found.asked %}{{ start.replace('NAME', found.answer) }}{% endif %}
{%- endif %}
"""


def template() -> str:
    """The template, its names set."""
    names = {"names": sorted(_CALLS), "ask": ASK, "start": start_of("NAME")}
    return "".join(f"{{%- set {name} = {value!r} %}}" for name, value in names.items()) + TEMPLATE
