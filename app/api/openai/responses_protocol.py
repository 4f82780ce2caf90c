"""Body of POST /v1/responses and the items of a conversation there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator
from pydantic_core import CoreSchema

from app.api.chat.call_arguments import FunctionName, form_of
from app.api.chat.generation_body import REFUSED_EVERYWHERE, GenerationBody, StreamOptions
from app.api.chat.messages import ReasoningEffort, Verbosity
from app.api.openai.responses_custom import CustomToolCallItem, CustomToolCallOutputItem, ResponsesTextTool
from app.api.openai.responses_text import ItemStatus, Part
from app.api.strict_models import History, StrictModel
from app.bounds import Count, Items, JsonObject, Metadata, Text
from app.errors import InvalidRequestError, UnsupportedError

REFUSED: Mapping[str, str] = {
    **REFUSED_EVERYWHERE,
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), "see /v1/chat/completions"),
    **dict.fromkeys(
        ("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids"), "see /v1/chat/completions"
    ),
    "context_management": "context is not edited by the server",
    "conversation": "there are no stored conversations; use previous_response_id",
    "logprobs": 'give include: ["message.output_text.logprobs"], and top_logprobs',
    "max_tokens": "give max_output_tokens",
    "moderation": "moderation is not supported",
    "n": "a response is one answer",
    "prompt": "there are no stored prompts",
    "prompt_logprobs": "see /v1/chat/completions",
    "response_format": "give text.format",
}
LOGPROBS = "message.output_text.logprobs"


class MessageItem(History):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Items[Part]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="Accepted; changes nothing.")


class FunctionCallItem(History):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: FunctionName
    arguments: Text
    id: str | None = None
    status: ItemStatus | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended inside the call."""
        if self.status != "incomplete":
            return False
        try:
            return not isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return True

    def for_chat(self) -> dict[str, Any]:
        """The call as a chat has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallOutputItem(History):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: Text | Items[Part]
    id: str | None = None
    status: ItemStatus | None = None


class ReasoningText(History):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(History):
    """Reasoning of an earlier answer; given to chat templates that show reasoning."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default_factory=list)
    content: Items[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: Text | None = Field(None, description="Accepted; this server's reasoning is not encrypted.")
    status: ItemStatus | None = None


def _item_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else "message"  # the easy form of a message has no type


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]


class FunctionTool(StrictModel):
    """A function of the client. Tools that OpenAI's servers run are refused."""

    type: Literal["function"]
    name: FunctionName
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments.")
    description: Text | None = None
    strict: bool | None = Field(None, description="Constrain the arguments to their schema; not, unless asked for.")

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else "function"
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedError(f"tools of type {kind!r} are not supported; function and custom are", param="tools")
        return data

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type"})}


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("json")] | Annotated[ResponsesTextTool, Tag("text")], Discriminator(form_of)
]


class NamedChoice(StrictModel):
    """The one tool that must be called."""

    type: Literal["function", "custom"]
    name: FunctionName


class TextFormat(StrictModel):
    """The shape of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("a schema belongs to type 'json_schema', and only to it")
        return self


class TextConfig(StrictModel):
    """How text is written."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(None, description="Given to chat templates that use it.")


class Reasoning(StrictModel):
    """How the model thinks, and what is shown of it."""

    effort: ReasoningEffort | None = Field(
        None, description="As reasoning_effort of a chat: given to chat templates that use it, none turns thinking off."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Show the reasoning, whole, as the summary instead of as the content of reasoning items."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Same as summary.")


class ResponseStreamOptions(StreamOptions):
    """Options of a stream."""

    @model_validator(mode="after")
    def _only_obfuscation(self) -> Self:
        if self.include_usage or self.continuous_usage_stats:
            raise UnsupportedError("the last event has the usage", param="stream_options")
        return self


class ResponsesRequest(GenerationBody):
    """Body of POST /v1/responses. Whatever of GenerationBody is not refused is given on as it is."""

    refused: ClassVar[dict[str, str]] = dict(REFUSED)

    input: Text | Items[InputItem] = Field(description="A text, or the items of a conversation.")
    instructions: Text | None = Field(None, description="What the model is told first; not kept for the next response.")
    previous_response_id: str | None = Field(
        None, max_length=256, description="The kept response that this one continues."
    )
    store: bool = Field(True, description="Keep the response, for GET and previous_response_id.")
    background: bool = Field(
        False, description="Answer at once and go on without the client; needs store. See GET /v1/responses/{id}."
    )
    max_output_tokens: Count | None = Field(None, ge=1, description="Most tokens to generate, reasoning included.")
    stream_options: ResponseStreamOptions | None = Field(None, description="About the stream.")
    text: TextConfig | None = Field(None, description="The shape of the answer's text.")
    reasoning: Reasoning | None = Field(None, description="How the model thinks, and what is shown of it.")
    tools: Items[ResponsesTool] | None = Field(None, description="Functions and custom tools the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        None, description="Whether it may, must or must not call."
    )
    parallel_tool_calls: bool = Field(True, description="False allows one call an answer.")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: drop the oldest turns of a conversation that is too long for the context."
    )
    include: Items[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = Field(
        None,
        max_length=16,
        description="message.output_text.logprobs adds the logprob of each token; reasoning items hold plain text.",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Most likely tokens to report a position; more than 0 includes the logprobs."
    )
    metadata: Metadata | None = Field(None, description="Kept with the response.")
    max_tool_calls: Count | None = Field(
        None, ge=1, description="Accepted; it bounds built-in tools, of which none is."
    )
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: str | None = Field(
        None, description="Names the session for routing policies that keep one together; prefixes are always cached."
    )
    prompt_cache_retention: str | None = Field(None, description="Accepted; prefixes are always cached.")
    prompt_cache_options: JsonObject | None = Field(None, description="Accepted; prefixes are always cached.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """Drop nulls as every GenerationBody does; what asks for nothing is not refused either, as SDKs send it."""
        if not isinstance(data, dict):
            return data
        given = {name for name, value in data.items() if value not in (None, False, [], {}) and value != 0}
        for name in sorted(cls.refused.keys() & given):
            raise UnsupportedError(f"{name}: {cls.refused[name]}", param=name)
        return {name: value for name, value in data.items() if name not in cls.refused and value is not None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [tool.name for tool in self.tools or ()]
        choice = self.tool_choice
        if (choice == "required" or isinstance(choice, NamedChoice)) and not names:
            raise InvalidRequestError("needs tools", param="tool_choice")
        known = {(tool.type, tool.name) for tool in self.tools or ()}
        if isinstance(choice, NamedChoice) and (choice.type, choice.name) not in known:
            raise InvalidRequestError(f"{choice.name!r} is not one of the tools", param="tool_choice.name")
        if self.background and not self.store:
            raise InvalidRequestError("a background response is kept: needs store=true", param="background")
        if isinstance(self.input, list) and not self.input and self.previous_response_id is None:
            raise InvalidRequestError("the conversation is empty", param="input")
        return self

    @property
    def items(self) -> list[InputItem]:
        """The input as items, whichever form was sent."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def wants_summary(self) -> bool:
        """Whether reasoning is shown as summaries."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the logprob of each token is reported."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema without the inherited fields that are refused."""
        described = handler.resolve_ref_schema(handler(schema))
        described["properties"] = {k: v for k, v in described["properties"].items() if k not in cls.refused}
        return described


class InputTokensRequest(ResponsesRequest):
    """Body of POST /v1/responses/input_tokens: that of a response, though a previous response may be all of it."""

    input: Text | Items[InputItem] = Field(default_factory=list, description="A text, or the items of a conversation.")
