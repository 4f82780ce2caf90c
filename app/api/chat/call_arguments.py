"""Code that tools of both forms, functions and custom tools, share."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from app.bounds import FUNCTION_NAME

FunctionName = Annotated[str, Field(pattern=f"^{FUNCTION_NAME}$")]


def _directly(callers: list[str]) -> list[str]:
    if "direct" not in callers:
        raise PydanticCustomError("unsupported", "programs run at other servers: the model has to be allowed to call")
    return callers


# Who may call a tool, as OpenAI and Anthropic say it: the model, or programs of its that their servers run.
AllowedCallers = Annotated[list[str], Field(max_length=16), AfterValidator(_directly)]


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
    """Tells which of the two forms a tool, a call or a choice has: "text" for custom tools. What is neither is
    described, or refused, as the usual one, "json"."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "text" if kind == "custom" else "json"
