"""Body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema

from app.api.chat.generation_body import REFUSED_EVERYWHERE, GenerationBody, StreamOptions
from app.api.chat.messages import ReasoningEffort, Verbosity
from app.api.http.strict_models import StrictModel, ignores_unknown
from app.api.openai.responses_calls import call_forms, choice_for_chat
from app.api.openai.responses_items import InputItem, MessageItem
from app.api.openai.responses_tools import ResponsesTool, ToolChoice, known_tools
from app.bounds import Count, Items, JsonObject, Metadata, Text
from app.errors import InvalidRequestError, UnsupportedError

REFUSED: Mapping[str, str] = {
    **REFUSED_EVERYWHERE,
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), "see /v1/chat/completions"),
    **dict.fromkeys(
        ("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids"), "see /v1/chat/completions"
    ),
    "access_programs": "there are no access programs",
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
IGNORED: Mapping[str, str] = {
    "background_options": "a background response begins as soon as there is room",
    "client_metadata": "what a program says of itself",
    "image": "requests hold no images",
    "prompt_cache_options": "prefixes are always cached",
    "prompt_cache_retention": "prefixes are always cached",
}
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
LOGPROBS = "message.output_text.logprobs"


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
    """Says how text is written."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(None, description="Given to chat templates that use it.")


class Reasoning(StrictModel):
    """Says how the model thinks, and what is shown of it."""

    effort: ReasoningEffort | None = Field(
        None, description="As reasoning_effort of a chat: given to chat templates that use it, none turns thinking off."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Show the reasoning, whole, as the summary instead of as the content of reasoning items."
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        None,
        description="current_turn leaves out the reasoning before the last message of the user; else the chat template "
        "decides what it shows.",
    )
    mode: Literal["standard"] | None = Field(None, description="Only standard.")
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

    refused: ClassVar[Mapping[str, str]] = REFUSED
    ignored: ClassVar[Mapping[str, str]] = IGNORED
    is_lenient: ClassVar[bool] = True

    input: Text | Items[InputItem] = Field(description="A text, or the items of a conversation.")
    instructions: Text | None = Field(None, description="What the model is told first; not kept for the next response.")
    previous_response_id: str | None = Field(
        None, max_length=256, description="The kept response that this one continues."
    )
    store: bool = Field(
        True,
        description="Keep the response, for GET and previous_response_id; the answer says false where that failed.",
    )
    background: bool = Field(
        False, description="Answer at once and go on without the client; needs store. See GET /v1/responses/{id}."
    )
    max_output_tokens: Count | None = Field(None, ge=1, description="Most tokens to generate, reasoning included.")
    stream_options: ResponseStreamOptions | None = Field(None, description="About the stream.")
    text: TextConfig | None = Field(None, description="The shape of the answer's text.")
    reasoning: Reasoning | None = Field(None, description="How the model thinks, and what is shown of it.")
    tools: Items[ResponsesTool] | None = Field(
        None, description="Tools the model may call: functions, custom tools, namespaces of both, and the client's own."
    )
    tool_choice: ToolChoice | None = Field(None, description="Whether it may, must or must not call, and what.")
    parallel_tool_calls: bool = Field(True, description="False allows one call an answer.")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: drop the oldest turns of a conversation that is too long for the context."
    )
    include: Items[Includable] | None = Field(
        None,
        max_length=16,
        description="message.output_text.logprobs adds the logprob of each token; reasoning items hold plain text, and "
        "of the other items none are there.",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Most likely tokens to report a position; more than 0 includes the logprobs."
    )
    metadata: Metadata | None = Field(None, description="Kept with the response.")
    max_tool_calls: Count | None = Field(
        None, ge=1, description="Accepted; it bounds built-in tools, of which none is."
    )
    user: str | None = Field(None, description="Shown in the response; changes nothing.")
    safety_identifier: str | None = Field(None, description="Shown in the response; changes nothing.")
    prompt_cache_key: str | None = Field(
        None, description="Names the session for routing policies that keep one together; prefixes are always cached."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")

    @field_validator("tools", mode="before")
    @classmethod
    def _only_known(cls, tools: Any, info: ValidationInfo) -> Any:
        return known_tools(tools, info)

    @field_validator("include", mode="before")
    @classmethod
    def _only_known_inclusions(cls, include: Any, info: ValidationInfo) -> Any:
        """An answer shows no more for what no version of the API had yet."""
        if not isinstance(include, list):
            return include
        known = get_args(Includable)
        return [one for one in include if one in known or not (isinstance(one, str) and ignores_unknown(info, one))]

    @model_validator(mode="after")
    def _check(self) -> Self:
        forms = call_forms(self.tools)
        if self.tool_choice not in (None, "none", "auto") and not forms:
            raise InvalidRequestError("needs tools", param="tool_choice")
        if self.tool_choice is not None:
            choice_for_chat(self.tool_choice, forms)
        if self.background and not self.store:
            raise InvalidRequestError("a background response is kept: needs store=true", param="background")
        if isinstance(self.input, list) and not self.input and self.previous_response_id is None:
            raise InvalidRequestError("the conversation is empty", param="input")
        return self

    @property
    def generates(self) -> bool:
        """True if the model is to answer."""
        return True

    @property
    def items(self) -> list[InputItem]:
        """The input as items, whichever form was sent."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def forgets_reasoning(self) -> bool:
        """True if reasoning before the last message of the user is left out."""
        return self.reasoning is not None and self.reasoning.context == "current_turn"

    @property
    def wants_summary(self) -> bool:
        """True if reasoning is shown as summaries."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def wants_logprobs(self) -> bool:
        """True if the logprob of each token is reported."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema without the inherited fields that are refused."""
        described = handler.resolve_ref_schema(handler(schema))
        described["properties"] = {k: v for k, v in described["properties"].items() if k not in cls.refused}
        return described


class InputTokensRequest(ResponsesRequest):
    """Body of POST /v1/responses/input_tokens: that of a response, though a previous response may be all of it."""

    refused: ClassVar[Mapping[str, str]] = {**REFUSED, "personality": "the model has no styles of its own"}

    input: Text | Items[InputItem] = Field(default_factory=list, description="A text, or the items of a conversation.")
