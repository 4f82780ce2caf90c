"""Tools of Anthropic's dialect: functions of the client, and those whose schema the API knows by name and version.

The client runs both. What Anthropic's servers run is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from app.api.chat.call_arguments import AllowedCallers, FunctionName
from app.api.http.strict_models import StrictModel, ignores_unknown
from app.bounds import Count, Items, JsonObject, Text
from app.errors import UnsupportedError

_IGNORED: Mapping[str, str] = {
    "cache_control": "prefixes are always cached",
    "defer_loading": "all tools are shown from the start",
}
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_LINES = {
    "type": "array",
    "items": _NUMBER,
    "minItems": 2,
    "maxItems": 2,
    "description": "First and last line to show; -1: to the end.",
}


def _schema(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


def _editor(inserted: str, *more: str) -> dict[str, Any]:
    """The schema of a text editor that calls what it inserts by a name."""
    about = "With str_replace: the text in its place; with insert: the text."
    texts = {"new_str": {**_TEXT, "description": about}, inserted: {**_TEXT, "description": about}}
    return _schema(
        ("command", "path"),
        command=_commands("view", "create", "str_replace", "insert", *more),
        path={**_TEXT, "description": "Absolute path of a file or folder."},
        file_text={**_TEXT, "description": "With create: the file's text."},
        old_str={**_TEXT, "description": "With str_replace: the text to be replaced, found exactly once."},
        insert_line={**_NUMBER, "description": "With insert: the line after which the text goes; 0: the beginning."},
        view_range={**_LINES, "description": f"With view: {_LINES['description']}"},
        **texts,
    )


_BASH = (
    "bash",
    "Runs a command in a shell that stays open between calls, and gives its output.",
    _schema((), command={**_TEXT, "description": "The command."}, restart={"type": "boolean"}),
)
_EDITS = "Shows, creates and changes files."
_OLD_EDITOR = "str_replace_editor", _EDITS, _editor("new_str", "undo_edit")
_MEMORY = _schema(
    ("command",),
    command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
    path={**_TEXT, "description": "A path below /memories."},
    view_range=_LINES,
    file_text={**_TEXT, "description": "With create: the file's text."},
    old_str={**_TEXT, "description": "With str_replace: the text to be replaced."},
    new_str={**_TEXT, "description": "With str_replace: the text in its place."},
    insert_line={**_NUMBER, "description": "With insert: the line after which the text goes."},
    insert_text={**_TEXT, "description": "With insert: the text."},
    old_path={**_TEXT, "description": "With rename: the path as it is."},
    new_path={**_TEXT, "description": "With rename: the path as it shall be."},
)
# Type -> the tool's name, what it does, and the schema of its input, as Anthropic's client libraries run them.
CLIENT_TOOLS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": ("str_replace_based_edit_tool", _EDITS, _editor("new_str")),
    "text_editor_20250728": ("str_replace_based_edit_tool", _EDITS, _editor("insert_text")),
    "memory_20250818": ("memory", "Keeps notes in files that outlast the conversation, and reads them.", _MEMORY),
}
ClientType = Literal[
    "bash_20241022",
    "bash_20250124",
    "text_editor_20241022",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "memory_20250818",
]
_FAMILIES = frozenset(kind.rpartition("_")[0] for kind in CLIENT_TOOLS)
_SEES = "needs a model that sees"
# What begins the type of a tool that is refused, and why.
REFUSED_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(
        ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_"), "runs at Anthropic"
    ),
    **dict.fromkeys(("computer_", "browser_"), _SEES),
    "mcp_toolset": "runs at Anthropic",
}


def _with_examples(description: str | None, examples: list[dict[str, Any]] | None) -> str | None:
    texts = [description] if description else []
    texts += [f"Example of its input: {json.dumps(each, ensure_ascii=False)}" for each in examples or ()]
    return "\n".join(texts) or None


class CustomTool(StrictModel):
    """A function of the client."""

    ignored: ClassVar[Mapping[str, str]] = {
        **_IGNORED,
        "eager_input_streaming": "input always streams as it comes",
    }

    name: FunctionName
    input_schema: JsonObject = Field(description="JSON schema of the input.")
    description: Text | None = None
    type: Literal["custom"] = "custom"
    strict: bool | None = Field(None, description="Constrain the input to its schema.")
    allowed_callers: AllowedCallers | None = None
    input_examples: Items[JsonObject] | None = Field(None, description="Shown to the model behind the description.")

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        described = _with_examples(self.description, self.input_examples)
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        function |= {"description": described} if described is not None else {}
        return {"type": "function", "function": function | ({} if self.strict is None else {"strict": self.strict})}


class ClientTool(StrictModel):
    """A tool that the client runs, of a schema that its type says."""

    ignored: ClassVar[Mapping[str, str]] = _IGNORED

    type: ClientType
    name: FunctionName | None = Field(None, description="The one that its type says.")
    strict: bool | None = Field(None, description="Constrain the input to its schema.")
    allowed_callers: AllowedCallers | None = None
    input_examples: Items[JsonObject] | None = Field(None, description="Shown to the model behind the description.")
    max_characters: Count | None = Field(None, ge=1, description="Accepted; the client cuts what it shows.")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.name not in (None, CLIENT_TOOLS[self.type][0]):
            raise ValueError(f"a tool of type {self.type} is called {CLIENT_TOOLS[self.type][0]!r}")
        return self

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        name, description, schema = CLIENT_TOOLS[self.type]
        described = _with_examples(description, self.input_examples)
        function: dict[str, Any] = {"name": name, "description": described, "parameters": schema}
        return {"type": "function", "function": function | ({} if self.strict is None else {"strict": self.strict})}


def _form(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "client" if kind in CLIENT_TOOLS else "custom"


Tool = Annotated[Annotated[CustomTool, Tag("custom")] | Annotated[ClientTool, Tag("client")], Discriminator(_form)]


def known_tools(tools: Any, info: ValidationInfo) -> Any:
    """The list of tools before it is read, without those of types that no table has where unknown fields are ignored.

    UnsupportedError names one that the client does not run.
    """
    if not isinstance(tools, list):
        return tools
    return [tool for i, tool in enumerate(tools) if _is_known(tool, i, info)]


def _is_known(tool: Any, index: int, info: ValidationInfo) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "custom" or kind in CLIENT_TOOLS:
        return True
    reasons = [why for prefix, why in REFUSED_TOOLS.items() if kind.startswith(prefix)]
    is_new = not reasons and kind.rpartition("_")[0] not in _FAMILIES  # not a later bash, of a schema that is not known
    if is_new and ignores_unknown(info, f"a tool of type {kind}"):
        return False
    why = f"it {reasons[0]}" if reasons else f"known: custom, {', '.join(CLIENT_TOOLS)}"
    raise UnsupportedError(f"tools of type {kind[:64]!r} are not supported; {why}", param=f"tools.{index}.type")
