"""Bodies of Anthropic's dialect. Strict: what is unknown, or known and not supported, is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.api.chat.call_arguments import FunctionName
from app.api.errors import ThreadUnsupportedError
from app.api.placement import PlacementFields
from app.api.strict_models import History, StrictModel
from app.bounds import Count, Items, JsonObject, Text
from app.errors import InvalidRequestError, UnsupportedError

REFUSED: Mapping[str, str] = {
    "container": "there are no containers",
    "context_management": "context is not edited by the server",
    "diagnostics": "not supported",
    "fallbacks": "there are no fallback models",
    "inference_geo": "the server does not choose where it runs",
    "mcp_servers": "the server connects to no MCP servers",
    "thread": "conversations are not held by the server",
    "user_profile_id": "there are no user profiles",
    "workspace_id": "there are no workspaces",
}


class CacheControl(StrictModel):
    """A break point of the prompt cache. Accepted: prefixes are always cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(History):
    """Text."""

    type: Literal["text"]
    text: Text


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
    content: Text | Items[Annotated[TextBlock, Field(discriminator=None)]] = ""
    is_error: bool = False


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
_BLOCKS_OF: Mapping[str, tuple[type[History], ...]] = {
    "user": (TextBlock, ToolResultBlock),
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
    def blocks(self) -> list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        """The content as blocks, whichever form was sent."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class CustomTool(StrictModel):
    """A function of the client. Tools that Anthropic's servers run are refused."""

    name: FunctionName
    input_schema: JsonObject = Field(description="JSON schema of the input.")
    description: Text | None = None
    type: Literal["custom"] = "custom"
    strict: bool | None = Field(None, description="Constrain the input to its schema.")
    cache_control: CacheControl | None = None
    input_examples: Items[JsonObject] | None = Field(None, max_length=0, description="Not supported.")
    eager_input_streaming: bool | None = Field(None, description="Accepted; input always streams as it comes.")

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            raise UnsupportedError(f"tools of type {kind!r} run at Anthropic; only custom tools are", param="tools")
        return data


class ToolChoice(StrictModel):
    """Whether the model may, must or must not call, and what."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With type tool: which one.")
    disable_parallel_tool_use: bool = Field(False, description="At most one call an answer.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name belongs to type 'tool', and only to it")
        return self


class Thinking(StrictModel):
    """Whether the model thinks before it answers."""

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
    """How the model should answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Given to chat templates that use reasoning_effort."
    )
    format: JsonFormat | None = None


class Metadata(StrictModel):
    """Anthropic's `metadata` of a request."""

    user_id: str | None = Field(None, description="Accepted; changes nothing.")


class CountTokensRequest(StrictModel):
    """Body of POST /v1/messages/count_tokens."""

    refused: ClassVar[Mapping[str, str]] = REFUSED

    model: str = Field(description="Which model.")
    messages: Items[Message] = Field(min_length=1, description="The conversation so far.")
    system: Text | Items[TextBlock] | None = Field(None, description="What the model is told first.")
    tools: Items[CustomTool] | None = Field(None, description="Functions the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether it may, must or must not call.")
    thinking: Thinking | None = Field(None, description="Whether the model thinks first, if its template can tell it.")
    output_config: OutputConfig | None = Field(None, description="Effort, and a JSON schema for the answer.")
    cache_control: CacheControl | None = Field(None, description="Accepted; prefixes are always cached.")
    speed: Literal["standard"] | None = Field(None, description="Only standard.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        given = data if isinstance(data, dict) else {}
        if given.get("thread"):
            raise ThreadUnsupportedError("thread: conversations are not held by the server", param="thread")
        for name in cls.refused.keys() & {name for name, value in given.items() if value not in (None, [], {})}:
            raise UnsupportedError(f"{name}: {cls.refused[name]}", param=name)
        return {name: value for name, value in given.items() if name not in cls.refused} if given else data

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        choice, names = self.tool_choice, [tool.name for tool in self.tools or ()]
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise InvalidRequestError(f"type {choice.type!r} needs tools", param="tool_choice")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise InvalidRequestError(f"{choice.name!r} is not one of the tools", param="tool_choice.name")
        if len(set(names)) < len(names):
            raise InvalidRequestError("names of tools must be unique", param="tools")
        return self


class MessagesRequest(PlacementFields, CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Count = Field(ge=1, description="Most tokens to generate, reasoning included.")
    stream: bool = Field(False, description="Answer as server-sent events while tokens come.")
    stop_sequences: Items[Text] | None = Field(None, description="Strings that end the answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the smallest set of tokens with this probability.")
    top_k: Count | None = Field(None, ge=-1, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    metadata: Metadata | None = Field(None, description="Accepted; changes nothing.")
    service_tier: Literal["auto", "standard_only"] | None = Field(  # type: ignore[assignment]  # Anthropic's words
        None, description="`auto`: the tenant's own class of service, `standard_only`: the class default."
    )
