"""Tools of /v1/responses: functions and custom tools, alone or in a namespace, and those whose schema the API knows.

The model sees all of them as tools of a chat; a tool of a namespace is called `namespace__name` there. Those that
OpenAI's servers run cannot run here: searches, which programs offer unasked, are not shown to the model, all others are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from app.api.chat.call_arguments import AllowedCallers, FunctionName
from app.api.http.strict_models import History, IgnoredFields, StrictModel, ignores_unknown
from app.bounds import Items, JsonObject, Text
from app.errors import UnsupportedError

REFUSED: Mapping[str, str] = {"async": "the model waits for what its calls give"}
IGNORED: Mapping[str, str] = {"defer_loading": "all tools are shown from the start"}

_AT_OPENAI = "runs at OpenAI"
REFUSED_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("file_search", "code_interpreter", "image_generation", "mcp"), _AT_OPENAI),
    **dict.fromkeys(("computer", "computer_use_preview"), "needs a model that sees"),
    "programmatic_tool_calling": _AT_OPENAI,
}
_SEARCHES = "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"
# Programs offer these to every model, unasked; an answer without them is one that OpenAI's may give, too.
IGNORED_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(_SEARCHES, "the server does not search; the model is not offered it"),
    "tool_search": "all tools are shown from the start",
}


class FunctionTool(StrictModel):
    """A function of the client."""

    refused: ClassVar[Mapping[str, str]] = REFUSED
    ignored: ClassVar[Mapping[str, str]] = {**IGNORED, "output_schema": "what a call gave is shown as it is"}

    type: Literal["function"]
    name: FunctionName
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments.")
    description: Text | None = None
    strict: bool | None = Field(None, description="Constrain the arguments to their schema; not, unless asked for.")
    allowed_callers: AllowedCallers | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        function = self.model_dump(exclude_none=True, exclude={"type", "allowed_callers"})
        return {"type": "function", "function": function}


class ResponsesTextFormat(StrictModel):
    """Says what the input of a custom tool looks like; a grammar's fields stand beside `type`."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, description="With type grammar.")
    definition: Text | None = Field(
        None, min_length=1, description="Lark, or a regular expression that the whole text matches."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {self.syntax is not None, self.definition is not None} != {self.type == "grammar"}:
            raise ValueError("syntax and definition belong to type 'grammar', and only to it")
        return self


class ResponsesTextTool(StrictModel):
    """A custom tool: it takes a text instead of JSON arguments."""

    refused: ClassVar[Mapping[str, str]] = REFUSED
    ignored: ClassVar[Mapping[str, str]] = IGNORED

    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: ResponsesTextFormat | None = Field(None, description="Any text when not given.")
    allowed_callers: AllowedCallers | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        custom = self.model_dump(exclude_none=True, exclude={"type", "format", "allowed_callers"})
        if self.format is not None:
            grammar = self.format.model_dump(exclude_none=True, exclude={"type"})
            custom["format"] = {"type": self.format.type} | ({"grammar": grammar} if grammar else {})
        return {"type": "custom", "custom": custom}


def name_in_namespace(namespace: str | None, name: str) -> str:
    """The name under which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


class NamespaceTool(StrictModel):
    """Functions and custom tools under a common name, with which their calls come back."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = Field(None, description="Shown to the model before that of the first tool.")
    tools: Items[Annotated[FunctionTool | ResponsesTextTool, Field(discriminator="type")]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for tool in self.tools:
            if len(name_in_namespace(self.name, tool.name)) > MAX_NAME_CHARS:
                raise ValueError(f"the names of namespace and tool have more than {MAX_NAME_CHARS - 2} characters")
        return self

    def for_chat(self) -> list[dict[str, Any]]:
        """The tools as a chat has them."""
        shown = [tool.for_chat() for tool in self.tools]
        for tool in shown:
            tool[tool["type"]]["name"] = name_in_namespace(self.name, tool[tool["type"]]["name"])
        first = shown[0][shown[0]["type"]]
        described = [text for text in (self.description, first.get("description")) if text]
        return [{**shown[0], shown[0]["type"]: first | {"description": "\n\n".join(described)}}, *shown[1:]]


MAX_NAME_CHARS = 128  # a FunctionName's

_STRINGS = {"type": "array", "items": {"type": "string"}}
_NUMBER = {"type": "integer", "minimum": 0}


def _function(name: str, description: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    function = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


class LocalEnvironment(History):
    """The client's own machine; containers are OpenAI's."""

    type: Literal["local"]


class ClientTool(StrictModel):
    """A tool that the client runs, of a schema that the API knows; calls and results are items of their own types."""

    type: Literal["local_shell", "shell", "apply_patch"]
    environment: LocalEnvironment | None = Field(None, description="With type shell: only local.")
    allowed_callers: AllowedCallers | None = None

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.type

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        return _CLIENT_TOOLS[self.type]


_CLIENT_TOOLS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "local_shell": _function(
            "local_shell",
            "Runs a command on the user's machine and gives its output.",
            ("command",),
            command={**_STRINGS, "description": "The program and its arguments."},
            working_directory={"type": "string"},
            timeout_ms=_NUMBER,
        ),
        "shell": _function(
            "shell",
            "Runs commands in a shell on the user's machine, and gives the output of each.",
            ("commands",),
            commands={**_STRINGS, "description": "Command lines."},
            timeout_ms=_NUMBER,
            max_output_length={**_NUMBER, "description": "Most characters of the output."},
        ),
        "apply_patch": _function(
            "apply_patch",
            "Creates, changes or deletes a file. `diff` is its new text with + before each line for create_file; for "
            "update_file, parts that begin with @@ and hold lines with a blank (kept), - (removed) or + (added) before "
            "them; empty for delete_file.",
            ("type", "path", "diff"),
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path={"type": "string"},
            diff={"type": "string"},
        ),
    }
)
_FORMS = {"function": "json", "custom": "text", "namespace": "namespace", **dict.fromkeys(_CLIENT_TOOLS, "client")}


def _form(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return _FORMS.get(kind, "json") if isinstance(kind, str) else "json"


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("json")]
    | Annotated[ResponsesTextTool, Tag("text")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ClientTool, Tag("client")],
    Discriminator(_form),
]


def known_tools(tools: Any, info: ValidationInfo) -> Any:
    """The list of tools, before it is read, without those that are ignored; they are counted. Of those that no table
    has, the model would not know how to call them: whether they are ignored is that of unknown fields.

    UnsupportedError names one that is refused.
    """
    if not isinstance(tools, list):
        return tools
    kept = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else "function"
        if not isinstance(kind, str) or kind in _FORMS:
            kept.append(tool)
        elif kind not in IGNORED_TOOLS:
            if kind not in REFUSED_TOOLS and ignores_unknown(info, f"a tool of type {kind}"):
                continue
            why = f"it {REFUSED_TOOLS[kind]}" if kind in REFUSED_TOOLS else f"known: {', '.join(_FORMS)}"
            raise UnsupportedError(f"tools of type {kind[:64]!r} are not supported; {why}", param=f"tools.{i}.type")
        elif isinstance(info.context, IgnoredFields):
            info.context[kind] += 1
    return kept


class NamedChoice(StrictModel):
    """The one tool that must be called."""

    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None


class ClientChoice(StrictModel):
    """The one tool of the client that must be called."""

    type: Literal["local_shell", "shell", "apply_patch"]

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.type


OneChoice = Annotated[NamedChoice | ClientChoice, Field(discriminator="type")]


class AllowedChoice(StrictModel):
    """Only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[OneChoice] = Field(min_length=1)


def _choice_kind(value: Any) -> str:
    if isinstance(value, str):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed" if kind == "allowed_tools" else "one"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[OneChoice, Tag("one")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(_choice_kind),
]
