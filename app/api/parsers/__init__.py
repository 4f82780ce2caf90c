"""Parsers that find structure in generated text: one file each, one line in the table.

Fed with the text as it comes, so a streamed answer and a collected one go through the same code and agree.
"""

from __future__ import annotations

from app.api.parsers.base import ToolParser
from app.registry import Registry

TOOL_PARSERS: Registry[type[ToolParser]] = Registry("tool parser", {"hermes": "app.api.parsers.hermes:HermesParser"})

# A template that writes calls in one of these forms belongs to a model that answers in it.
_MARKS = {"hermes": "<tool_call>"}


def tool_parser_name(template_source: str) -> str | None:
    """The parser for the models of a chat template; None when its way of calling tools is not known."""
    return next((name for name, mark in _MARKS.items() if mark in template_source), None)
