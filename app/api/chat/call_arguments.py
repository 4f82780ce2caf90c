"""What tools of both forms, functions and custom tools, have in common."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

# Ours is the widest of what OpenAI (64 characters), Anthropic (128) and servers of tools (dots) allow.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Arguments(dict[str, Any]):
    """Arguments of a call: an object that templates may walk through, and its JSON text where they print it.

    Published templates do either: some write `arguments | tojson`, some add `arguments` to a text.
    """

    def __init__(self, value: dict[str, Any], text: str | None = None) -> None:
        super().__init__(value)
        self._text = json.dumps(value, ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def form_of(tool: Any) -> str:
    """Which of the two forms a tool, a call or a choice has: "text" for custom tools. What is neither is described, or
    refused, as the usual one, "json"."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "text" if kind == "custom" else "json"
