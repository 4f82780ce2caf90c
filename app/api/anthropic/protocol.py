"""Bodies of Anthropic's dialect: what would change the answer and is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.anthropic.documents import DocumentBlock, TextBlock
from app.api.anthropic.images import ImageBlock
from app.api.anthropic.tools import Tool, known_tools
from app.api.chat.call_arguments import FunctionName
from app.api.generation.placement import PlacementFields
from app.api.http.errors import ThreadUnsupportedError
from app.api.http.strict_models import History, StrictModel
from app.bounds import Count, Items, JsonObject, Text
from app.errors import InvalidRequestError

REFUSED: Mapping[str, str] = {
    "container": "there are no containers",
    "diagnostics": "not supported",
    "fallbacks": "there are no fallback models",
    "inference_geo": "the server does not choose where it runs",
    "mcp_servers": "the server connects to no MCP servers",
    "output_format": "deprecated by Anthropic; use output_config.format",
    "thread": "conversations are not held by the server",
    "user_profile_id": "there are no user profiles",
    "workspace_id": "there are no workspaces",
}
IGNORED: Mapping[str, str] = {
    "betas": "the fields of a beta are read, ignored or refused without it",
    "billing_policy": "nothing is billed",
    "cache_control": "prefixes are always cached",
    "fallback_credit_token": "nothing is billed",
    "metadata": "it names a user at Anthropic",
}


class ThinkingBlock(History):
    """Reasoning of an earlier answer; given to chat templates that show reasoning. The signature is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(History):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: FunctionName
    input: JsonObject


class ToolResultBlock(History):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Text | Items[Annotated[TextBlock | DocumentBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: bool = False


ContentBlock = Annotated[
    TextBlock | DocumentBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_BLOCKS_OF: Mapping[str, tuple[type[History], ...]] = {
    "user": (TextBlock, DocumentBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class Message(History):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Items[ContentBlock]

    @model_validator(mode="after")
    def _fitting_blocks(self) -> Self:
        for block in self.content if isinstance(self.content, list) else ():
            if not isinstance(block, _BLOCKS_OF[self.role]):
                raise ValueError(f"a block of type {block.type!r} may not stand in a message of role {self.role!r}")
        return self

    @property
    def blocks(self) -> list[TextBlock | DocumentBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        """The content as blocks, whichever form was sent."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ToolChoice(StrictModel):
    """Says whether the model may, must or must not call, and what."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With type tool: which one.")
    disable_parallel_tool_use: bool = Field(False, description="At most one call an answer.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name belongs to type 'tool', and only to it")
        return self


class Thinking(StrictModel):
    """Says whether the model thinks before it answers."""

    ignored: ClassVar[Mapping[str, str]] = {"block_binding": "earlier reasoning is taken as it is"}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = Field(None, ge=1024, description="Most tokens of the reasoning.")
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: reasoning is not shown.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens belongs to type 'enabled', and only to it")
        return self


class JsonFormat(StrictModel):
    """The shape of the answer."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(StrictModel):
    """Says how the model should answer."""

    refused: ClassVar[Mapping[str, str]] = {"task_budget": "the model is told of no budget; see max_tokens"}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Given to chat templates that use reasoning_effort."
    )
    format: JsonFormat | None = None


class ThinkingTurns(StrictModel):
    """The turns whose reasoning stays."""

    type: Literal["all"]


class ContextEdit(StrictModel):
    """An edit of the context. Others than this one would change the prompt, and are refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns

    @model_validator(mode="before")
    @classmethod
    def _changes_nothing(cls, data: Any) -> Any:
        given = data if isinstance(data, dict) else {}
        keep = given.get("keep")
        if given.get("type") != "clear_thinking_20251015" or keep not in ("all", {"type": "all"}):
            words = {"kind": str(given.get("type"))[:64]}
            message = (
                "the server does not edit the context by {kind}; only clear_thinking_20251015 with keep all is taken"
            )
            raise PydanticCustomError("unsupported", message, words)
        return data


class ContextManagement(StrictModel):
    """Lists what Anthropic's server would take out of a conversation."""

    edits: Items[ContextEdit] = Field(default_factory=list)


class CountTokensRequest(StrictModel):
    """Body of POST /v1/messages/count_tokens."""

    refused: ClassVar[Mapping[str, str]] = REFUSED
    ignored: ClassVar[Mapping[str, str]] = {
        **IGNORED,
        "compaction": "what is counted is the conversation as it was sent",
    }
    is_lenient: ClassVar[bool] = True

    model: str = Field(description="Which model.")
    messages: Items[Message] = Field(min_length=1, description="The conversation so far.")
    system: Text | Items[TextBlock] | None = Field(None, description="What the model is told first.")
    tools: Items[Tool] | None = Field(
        None, description="Functions the model may call, and the client's own bash, text editor and memory."
    )
    tool_choice: ToolChoice | None = Field(None, description="Whether it may, must or must not call.")
    thinking: Thinking | None = Field(None, description="Whether the model thinks first; ignored by one that cannot.")
    output_config: OutputConfig | None = Field(None, description="Effort, and a JSON schema for the answer.")
    context_management: ContextManagement | None = Field(None, description="Only edits that change nothing.")
    speed: Literal["standard"] | None = Field(None, description="Only standard.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        given = data if isinstance(data, dict) else {}
        if given.get("thread"):
            raise ThreadUnsupportedError("thread: conversations are not held by the server", param="thread")
        return data

    @field_validator("tools", mode="before")
    @classmethod
    def _only_the_client_s(cls, tools: Any, info: ValidationInfo) -> Any:
        return known_tools(tools, info)

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        choice = self.tool_choice
        names = [tool.for_chat()["function"]["name"] for tool in self.tools or ()]
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise InvalidRequestError(f"type {choice.type!r} needs tools", param="tool_choice")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise InvalidRequestError(f"{choice.name!r} is not one of the tools", param="tool_choice.name")
        if len(set(names)) < len(names):
            raise InvalidRequestError("names of tools must be unique", param="tools")
        return self


class MessagesRequest(PlacementFields, CountTokensRequest):
    """Body of POST /v1/messages."""

    refused: ClassVar[Mapping[str, str]] = {**REFUSED, "compaction": "conversations are not summed up by the server"}
    ignored: ClassVar[Mapping[str, str]] = IGNORED

    max_tokens: Count = Field(ge=1, description="Most tokens to generate, reasoning included.")
    stream: bool = Field(False, description="Answer as server-sent events while tokens come.")
    stop_sequences: Items[Text] | None = Field(None, description="Strings that end the answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the smallest set of tokens with this probability.")
    top_k: Count | None = Field(None, ge=-1, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    service_tier: Literal["auto", "standard_only"] | None = Field(  # type: ignore[assignment]  # Anthropic's words
        None, description="`auto`: the tenant's own class of service, `standard_only`: the class default."
    )
