"""Parsers that find structure in generated text (app/parsers): one file and one line of a table each.

A parser that `auto` shall find has a second line: what the chat templates of its models write. A plugin's has a second
entry point for that, and is asked where none of ours matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.plugins import PluginGroup
from app.registry import Registry

# Classes of ToolParser and ReasoningParser, by the names of `tool_parser` and `reasoning_parser`.
TOOL_PARSERS: Registry[Any] = Registry(
    "tool parser",
    {
        "hermes": "app.parsers.hermes:HermesParser",
        "llama3_json": "app.parsers.llama3_json:Llama3JsonParser",
        "mistral": "app.parsers.mistral:MistralParser",
        "qwen3_coder": "app.parsers.qwen3_coder:Qwen3CoderParser",
        "seed_oss": "app.parsers.seed_oss:SeedOssParser",
        "minimax_m2": "app.parsers.minimax_m2:MiniMaxM2Parser",
        "glm45": "app.parsers.glm:Glm45Parser",
        "glm47": "app.parsers.glm:Glm47Parser",
        "deepseek_v3": "app.parsers.deepseek:DeepSeekV3Parser",
        "deepseek_v31": "app.parsers.deepseek:DeepSeekV31Parser",
        "pythonic": "app.parsers.pythonic:PythonicParser",
        "harmony": "app.parsers.harmony:HarmonyParser",
    },
    PluginGroup("tool_parsers", "app.parsers.base:ToolParser"),
)

REASONING_PARSERS: Registry[Any] = Registry(
    "reasoning parser",
    {
        "think": "app.parsers.think:ThinkParser",
        "deepseek_r1": "app.parsers.think:DeepSeekR1Parser",
        "mistral": "app.parsers.think:MistralThinkParser",
        "seed_oss": "app.parsers.seed_oss:SeedOssThinkParser",
        "harmony": "app.parsers.harmony:HarmonyReasoningParser",
    },
    PluginGroup("reasoning_parsers", "app.parsers.base:ReasoningParser"),
)

# Marks of plugins' parsers, by the parsers' names: tuples of strings.
TOOL_MARKS: Registry[tuple[str, ...]] = Registry(
    "marks of tool parser", {}, PluginGroup("tool_parser_marks", "builtins:tuple", are_instances=True)
)
REASONING_MARKS: Registry[tuple[str, ...]] = Registry(
    "marks of reasoning parser", {}, PluginGroup("reasoning_parser_marks", "builtins:tuple", are_instances=True)
)

# A template that writes all of these belongs to a model that answers in the form of the parser. First match wins.
# None: forms with markers like those below that no parser reads: Apriel's, Functionary's, others with <invoke>.
_TOOL_MARKS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    ("glm47", ("<tool_call>{function-name}<arg_key>",)),
    ("glm45", ("<arg_key>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    (None, ("<invoke name=",)),
    (None, ("<tool_calls>[",)),
    (None, ("<|python_tag|>", "<function=")),
    ("harmony", ("<|channel|>", "functions.")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<|tool_call_start|>[",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
)
_REASONING_MARKS = (
    ("harmony", ("<|channel|>",)),
    ("seed_oss", ("</seed:think>",)),
    ("think", ("</think>",)),
    ("mistral", ("[/THINK]",)),
)


def tool_parser_name(template_source: str) -> str | None:
    """The parser for the models of a chat template; None when its way of calling tools is not known."""
    return _by_marks(_TOOL_MARKS, template_source) or _by_plugin(TOOL_MARKS, TOOL_PARSERS, template_source)


def reasoning_parser_name(template_source: str) -> str | None:
    """The parser for the reasoning of a chat template's models; None when they are not known to think."""
    own = _by_marks(_REASONING_MARKS, template_source)
    return own or _by_plugin(REASONING_MARKS, REASONING_PARSERS, template_source)


def _by_marks(table: Iterable[tuple[str | None, tuple[str, ...]]], source: str) -> str | None:
    return next((name for name, marks in table if all(mark in source for mark in marks)), None)


def _by_plugin(marks: Registry[tuple[str, ...]], parsers: Registry[Any], source: str) -> str | None:
    """The first plugin all of whose marks a template writes; one without any is found by no template."""
    for name in marks:
        wanted = marks.load(name)
        if parsers.plugin(name) is not None and wanted and all(mark in source for mark in wanted):
            return name
    return None
