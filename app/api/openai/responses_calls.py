"""Calls of tools as items of a response: each kind of tool has a form, and the model's call becomes an item of it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic_core import from_json

from app.api.openai.responses_items import MAX_COUNT
from app.api.openai.responses_tools import (
    AllowedChoice,
    ClientChoice,
    NamedChoice,
    NamespaceTool,
    ResponsesTool,
    name_in_namespace,
)
from app.errors import InvalidRequestError

_OPERATIONS = ("create_file", "update_file", "delete_file")


@dataclass(frozen=True, slots=True)
class CallForm(ABC):
    """Writes the calls of one tool, so that the item can be sent back whatever the model wrote."""

    name: str
    namespace: str | None = None

    type: ClassVar[str]
    prefix: ClassVar[str]  # of an item's id
    chat_type: ClassVar[str] = "function"  # the tool's type in a chat
    events: ClassVar[str | None] = None  # the name of the events about what a call gives; None: it comes as a whole

    @abstractmethod
    def given(self, text: str) -> dict[str, Any]:
        """The fields of an item that say what a call gives, of which `text` is what the model wrote."""

    def fields(self, call_id: str, text: str) -> dict[str, Any]:
        """The item of a call, but for id and status."""
        return {"type": self.type, "call_id": call_id, **self.given(text)}

    def status(self, status: str) -> str:
        """An item's status, in the words of its kind."""
        return status

    def done(self, text: str) -> dict[str, Any]:
        """Returns what the event says with which the call's text ends."""
        raise AssertionError(f"{self.type} has no such event")

    def _named(self) -> dict[str, Any]:
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})


class FunctionForm(CallForm):
    """A function's: arguments as JSON text."""

    __slots__ = ()
    type, prefix, events = "function_call", "fc", "response.function_call_arguments"

    def given(self, text: str) -> dict[str, Any]:
        """Name and arguments."""
        return {**self._named(), "arguments": text}

    def done(self, text: str) -> dict[str, Any]:
        """Name and arguments."""
        return {"name": self.name, "arguments": text}


class CustomForm(CallForm):
    """A custom tool's: a text."""

    __slots__ = ()
    type, prefix, chat_type, events = "custom_tool_call", "ctc", "custom", "response.custom_tool_call_input"

    def given(self, text: str) -> dict[str, Any]:
        """Name and input."""
        return {**self._named(), "input": text}

    def done(self, text: str) -> dict[str, Any]:
        """The input."""
        return {"input": text}


class LocalShellForm(CallForm):
    """A command of `local_shell`."""

    __slots__ = ()
    type, prefix = "local_shell_call", "lsh"

    def given(self, text: str) -> dict[str, Any]:
        """The action."""
        said = _object(text)
        action: dict[str, Any] = {"type": "exec", "command": _texts(said.get("command")), "env": {}}
        if (timeout_ms := _count(said.get("timeout_ms"))) is not None:
            action["timeout_ms"] = timeout_ms
        if isinstance(directory := said.get("working_directory"), str):
            action["working_directory"] = directory
        return {"action": action}


class ShellForm(CallForm):
    """Commands of `shell`."""

    __slots__ = ()
    type, prefix = "shell_call", "sh"

    def given(self, text: str) -> dict[str, Any]:
        """The action."""
        said = _object(text)
        limits = {name: _count(said.get(name)) for name in ("timeout_ms", "max_output_length")}
        return {"action": {"commands": _texts(said.get("commands")), **limits}, "environment": {"type": "local"}}


class ApplyPatchForm(CallForm):
    """An operation of `apply_patch` on a file."""

    __slots__ = ()
    type, prefix = "apply_patch_call", "apc"

    def given(self, text: str) -> dict[str, Any]:
        """The operation."""
        said = _object(text)
        kind = said.get("type")  # may be cut short
        operation = {"type": kind if kind in _OPERATIONS else "update_file", "path": str(said.get("path", ""))}
        has_diff = operation["type"] != "delete_file"
        return {"operation": operation | ({"diff": str(said.get("diff", ""))} if has_diff else {})}

    def status(self, status: str) -> str:
        """It knows no incomplete one: nobody applies what is in progress."""
        return "in_progress" if status == "incomplete" else status


_CLIENT_FORMS: Mapping[str, type[CallForm]] = {
    "local_shell": LocalShellForm,
    "shell": ShellForm,
    "apply_patch": ApplyPatchForm,
}


def call_forms(tools: Iterable[ResponsesTool] | None) -> dict[str, CallForm]:
    """The form of each tool by the name under which the model knows it. InvalidRequestError where two have one name."""
    forms: dict[str, CallForm] = {}
    for tool in tools or ():
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for each in tool.tools if isinstance(tool, NamespaceTool) else (tool,):
            name = name_in_namespace(namespace, each.name)
            if name in forms:
                raise InvalidRequestError(f"two tools are called {name!r}", param="tools")
            kind = CustomForm if each.type == "custom" else _CLIENT_FORMS.get(each.type, FunctionForm)
            forms[name] = kind(each.name, namespace)
    return forms


def chosen(choice: NamedChoice | ClientChoice, forms: Mapping[str, CallForm]) -> dict[str, Any]:
    """A choice of one tool as a chat has it; InvalidRequestError where there is no such tool, or there are several."""
    namespace = choice.namespace if isinstance(choice, NamedChoice) else None
    names = [name_in_namespace(namespace, choice.name)]
    if namespace is None and names[0] not in forms:  # without its namespace, which OpenAI's choices cannot say
        names = [name for name, form in forms.items() if form.name == choice.name]
    found = [name for name in names if name in forms and _fits(choice.type, forms[name])]
    if len(found) != 1:
        which = "is one of several tools: give its namespace" if found else "is not one of the tools"
        raise InvalidRequestError(f"{choice.name!r} {which}", param="tool_choice.name")
    kind = forms[found[0]].chat_type
    return {"type": kind, kind: {"name": found[0]}}


def _fits(kind: str, form: CallForm) -> bool:
    return isinstance(form, _CLIENT_FORMS[kind]) if kind in _CLIENT_FORMS else form.type.startswith(kind)


def choice_for_chat(
    choice: str | NamedChoice | ClientChoice | AllowedChoice, forms: Mapping[str, CallForm]
) -> str | dict[str, Any]:
    """A choice of tools as a chat has it."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, AllowedChoice):
        tools = [chosen(tool, forms) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return chosen(choice, forms)


def _object(text: str) -> dict[str, Any]:
    """Reads what the model wrote; as much as there is where the answer was cut short."""
    try:
        said = from_json(text, allow_partial="trailing-strings") if text.strip() else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


def _texts(value: Any) -> list[str]:
    return [each if isinstance(each, str) else json.dumps(each) for each in value] if isinstance(value, list) else []
