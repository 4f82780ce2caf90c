"""Items of a conversation in /v1/responses, as clients send them back."""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Discriminator, Field, Tag, field_validator, model_validator

from app.api.chat.call_arguments import FunctionName
from app.api.chat.media_parts import content_of
from app.api.http.strict_models import History
from app.api.openai.responses_text import Content, ItemMedia, ItemStatus, Part
from app.api.openai.responses_tools import name_in_namespace
from app.bounds import Items, Text

MAX_COUNT = 1 << 53  # what every reader of JSON takes


class Item(History):
    """Holds what all of them have."""

    type: str
    id: str | None = None


class CallItem(Item):
    """A call that an earlier answer made."""

    call_id: str = Field(min_length=1)
    status: ItemStatus | None = None

    @property
    def is_cut(self) -> bool:
        """True if the answer ended inside the call."""
        return self.status == "incomplete"

    def for_chat(self) -> dict[str, Any]:
        """The call as a chat has it."""
        name, arguments = self.function()
        return {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def function(self) -> tuple[str, Any]:
        """Name and arguments of the function that is called."""
        raise NotImplementedError


class ResultItem(Item):
    """The result of a call."""

    call_id: str = Field(min_length=1)

    def for_chat(self, place: str) -> dict[str, Any]:
        """The result as a chat has it; `place`: of the item in the body."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.content_for_chat(place)}

    def content_for_chat(self, place: str) -> str | list[Any]:
        """Returns what the result says, and shows."""
        return self.text()

    def text(self) -> str:
        """The result as the model sees it."""
        raise NotImplementedError


class SaidResultItem(ResultItem):
    """A result that is a text, maybe with pictures or sounds."""

    output: Text | Items[Part]
    status: ItemStatus | None = None

    def content_for_chat(self, place: str) -> str | list[Any]:
        """Returns what the result says, and shows."""
        return content_for_chat(self.output, part_of(place, "output"))

    def text(self) -> str:
        """The result as the model sees it."""
        return text_of(self.output)


class MessageItem(Item):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Items[Part]
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="Accepted; changes nothing.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role == "assistant" and has_media(self.content):
            raise ValueError("a message of the assistant shows no pictures and has no sounds")
        return self


class FunctionCallItem(CallItem):
    """A call of a function."""

    type: Literal["function_call"]
    name: FunctionName
    arguments: Text
    namespace: FunctionName | None = None

    @property
    def is_cut(self) -> bool:
        """True if the answer ended inside the arguments."""
        if not super().is_cut:
            return False
        try:
            return not isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return True

    def function(self) -> tuple[str, Any]:
        """Name and arguments of the function that is called."""
        return name_in_namespace(self.namespace, self.name), self.arguments


class FunctionCallOutputItem(SaidResultItem):
    """The result of a function."""

    type: Literal["function_call_output"]


class ReasoningText(History):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Item):
    """Reasoning of an earlier answer; given to chat templates that show reasoning."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default_factory=list)
    content: Items[ReasoningText] | None = None
    encrypted_content: Text | None = Field(None, description="Accepted; this server's reasoning is not encrypted.")
    status: ItemStatus | None = None


class CustomToolCallItem(CallItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    name: FunctionName
    input: Text
    namespace: FunctionName | None = None

    def for_chat(self) -> dict[str, Any]:
        """The call as a chat has it."""
        custom = {"name": name_in_namespace(self.namespace, self.name), "input": self.input}
        return {"id": self.call_id, "type": "custom", "custom": custom}


class CustomToolCallOutputItem(SaidResultItem):
    """The result of a custom tool."""

    type: Literal["custom_tool_call_output"]


class LocalShellAction(History):
    """A command."""

    command: Items[Text]
    working_directory: Text | None = None
    timeout_ms: int | None = Field(None, ge=0, le=MAX_COUNT)


class LocalShellCallItem(CallItem):
    """A call of `local_shell`."""

    type: Literal["local_shell_call"]
    action: LocalShellAction

    def function(self) -> tuple[str, Any]:
        """Name and arguments of the function that is called."""
        return "local_shell", self.action.model_dump(exclude_none=True)


class LocalShellCallOutputItem(SaidResultItem):
    """The result of a command. OpenAI's types call the call's id `id`."""

    type: Literal["local_shell_call_output"]
    call_id: str = Field(min_length=1, validation_alias=AliasChoices("call_id", "id"))


class ShellAction(History):
    """Commands."""

    commands: Items[Text]
    timeout_ms: int | None = Field(None, ge=0, le=MAX_COUNT)
    max_output_length: int | None = Field(None, ge=0, le=MAX_COUNT)


class ShellCallItem(CallItem):
    """A call of `shell`."""

    type: Literal["shell_call"]
    action: ShellAction

    def function(self) -> tuple[str, Any]:
        """Name and arguments of the function that is called."""
        return "shell", self.action.model_dump(exclude_none=True)


class ShellOutcome(History):
    """The end of a command."""

    type: Literal["exit", "timeout"]
    exit_code: int | None = Field(None, ge=-(1 << 31), le=1 << 31)


class ShellOutput(History):
    """The output of a command."""

    stdout: Text = ""
    stderr: Text = ""
    outcome: ShellOutcome

    def text(self) -> str:
        """The output as the model sees it."""
        end = "timed out" if self.outcome.type == "timeout" else f"exit code {self.outcome.exit_code}"
        return "\n".join(text for text in (self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), f"[{end}]") if text)


class ShellCallOutputItem(ResultItem):
    """The results of commands."""

    type: Literal["shell_call_output"]
    output: Items[ShellOutput]
    status: ItemStatus | None = None

    def text(self) -> str:
        """The results as the model sees them."""
        return "\n".join(each.text() for each in self.output)


class PatchOperation(History):
    """A change of a file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: Text
    diff: Text = ""


class ApplyPatchCallItem(CallItem):
    """A call of `apply_patch`."""

    type: Literal["apply_patch_call"]
    operation: PatchOperation

    @property
    def is_cut(self) -> bool:
        """True if the answer ended inside the call."""
        return self.status in ("in_progress", "incomplete")

    def function(self) -> tuple[str, Any]:
        """Name and arguments of the function that is called."""
        return "apply_patch", self.operation.model_dump()


class ApplyPatchCallOutputItem(ResultItem):
    """The result of a change."""

    type: Literal["apply_patch_call_output"]
    status: Literal["completed", "failed"]
    output: Text | None = None

    def text(self) -> str:
        """The result as the model sees it."""
        return self.output or self.status


class CompactionItem(Item):
    """A conversation summed up by /v1/responses/compact."""

    type: Literal["compaction"]
    encrypted_content: Text

    @field_validator("encrypted_content")
    @classmethod
    def _is_ours(cls, value: str) -> str:
        unpacked(value)
        return value

    @property
    def summary(self) -> str:
        """The summary that /v1/responses/compact wrote."""
        return unpacked(self.encrypted_content)


_SUMMARY = "manta1:"  # before a summary that this server wrote: it is packed, not encrypted


def packed(summary: str) -> str:
    """A summary as `encrypted_content`."""
    return _SUMMARY + base64.b64encode(summary.encode("utf-8", "replace")).decode()


def unpacked(content: str) -> str:
    """The summary in an `encrypted_content`; ValueError where it is none of ours."""
    if not content.startswith(_SUMMARY):
        raise ValueError("is none of this server's")
    return base64.b64decode(content.removeprefix(_SUMMARY), validate=True).decode()


class ItemReference(History):
    """An item of a kept response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str = Field(min_length=1, max_length=256)


def part_of(place: str, part: str) -> str:
    """A place within a place; what is in an input that came in several requests has none of its own."""
    return f"{place}.{part}" if "." in place else place


def text_of(content: Content) -> str:
    """The texts of content in either form as one."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def has_media(content: Content) -> bool:
    """True if a picture or a sound is among content in either form."""
    return not isinstance(content, str) and any(isinstance(part, ItemMedia) for part in content)


def content_for_chat(content: Content, place: str) -> str | list[Any]:
    """Content in either form as a chat's message has it: one text, and parts where pictures or sounds are among it."""
    if isinstance(content, str):
        return content
    return content_of(
        part.for_chat(part_of(place, str(i))) if isinstance(part, ItemMedia) else part.text
        for i, part in enumerate(content)
    )


def _item_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if isinstance(kind, str):
        return kind
    is_reference = isinstance(value, dict) and "id" in value and "role" not in value
    return "item_reference" if is_reference else "message"  # the easy form of a message has no type


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[LocalShellCallOutputItem, Tag("local_shell_call_output")]
    | Annotated[ShellCallItem, Tag("shell_call")]
    | Annotated[ShellCallOutputItem, Tag("shell_call_output")]
    | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
    | Annotated[ApplyPatchCallOutputItem, Tag("apply_patch_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_kind),
]
ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "reasoning": "rs",
    "compaction": "cmp",
}
