"""Body of POST /v1/responses and the items of a conversation there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from app.api.openai.closed import Closed, History
from app.api.openai.messages import ReasoningEffort, Verbosity
from app.api.openai.tools import FunctionName
from app.engine.request import Priority
from app.errors import InvalidRequestError, UnsupportedError

REFUSED: Mapping[str, str] = {
    "background": "responses are not made in the background",
    "context_management": "context is not edited by the server",
    "conversation": "there are no stored conversations; use previous_response_id",
    "moderation": "moderation is not supported",
    "n": "a response is one answer",
    "prompt": "there are no stored prompts",
    "top_logprobs": "logprobs are not reported here; use /v1/chat/completions",
}
INCLUDED = ("reasoning.encrypted_content",)


class ItemText(History):
    """Text in a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ItemRefusal(History):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


Part = Annotated[ItemText | ItemRefusal, Field(discriminator="type")]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(History):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="Accepted; changes nothing.")


class FunctionCallItem(History):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: FunctionName
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(History):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None


class ReasoningText(History):
    """A piece of a thought, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(History):
    """A thought of an earlier answer; given to chat templates that show thoughts."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: str | None = Field(None, description="Accepted; this server's thoughts are not encrypted.")
    status: Status | None = None


def _item_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else "message"  # the easy form of a message has no type


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]


class FunctionTool(Closed):
    """A function of the client. Tools that OpenAI's servers run are refused."""

    type: Literal["function"]
    name: FunctionName
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    description: str | None = None
    strict: bool | None = Field(None, description="Constrain the arguments to their schema; not, unless asked for.")

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else "function"
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedError(f"tools of type {kind!r} are not supported; only functions are", param="tools")
        return data


class NamedChoice(Closed):
    """The one function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Closed):
    """The shape of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("a schema belongs to type 'json_schema', and only to it")
        return self


class TextConfig(Closed):
    """How text is written."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(None, description="Given to chat templates that use it.")


class Reasoning(Closed):
    """How the model thinks, and what is shown of it."""

    effort: ReasoningEffort | None = Field(
        None, description="As reasoning_effort of a chat: given to chat templates that use it, none turns thinking off."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Show the thoughts, whole, as the summary instead of as the content of reasoning items."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Same as summary.")


class ResponseStreamOptions(Closed):
    """About the stream."""

    include_obfuscation: Literal[False] = Field(False, description="Padding against traffic analysis: only false.")


class ResponsesRequest(Closed):
    """Body of POST /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = REFUSED

    input: str | list[InputItem] = Field(description="A text, or the items of a conversation.")
    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    instructions: str | None = Field(None, description="What the model is told first; not kept for the next response.")
    previous_response_id: str | None = Field(None, description="The kept response that this one continues.")
    store: bool = Field(True, description="Keep the response, for GET and previous_response_id.")
    max_output_tokens: int | None = Field(None, ge=1, description="Most tokens to generate, thoughts included.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the smallest set of tokens with this probability.")
    stream: bool = Field(False, description="Answer as server-sent events while tokens come.")
    stream_options: ResponseStreamOptions | None = Field(None, description="About the stream.")
    text: TextConfig | None = Field(None, description="The shape of the answer's text.")
    reasoning: Reasoning | None = Field(None, description="How the model thinks, and what is shown of it.")
    tools: list[FunctionTool] | None = Field(None, description="Functions the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        None, description="Whether it may, must or must not call."
    )
    parallel_tool_calls: bool = Field(True, description="False allows one call an answer.")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: drop the oldest turns of a conversation that is too long for the context."
    )
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="Accepted; thoughts are in the reasoning items as they are."
    )
    metadata: dict[str, str] | None = Field(None, description="Kept with the response.")
    max_tool_calls: int | None = Field(None, ge=1, description="Accepted; it bounds built-in tools, of which none is.")
    user: str | None = Field(None, description="Accepted; changes nothing.")
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: str | None = Field(None, description="Accepted; prefixes are always cached.")
    prompt_cache_retention: str | None = Field(None, description="Accepted; prefixes are always cached.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted; prefixes are always cached.")
    service_tier: str | None = Field(None, description="Accepted; there is one tier.")

    top_k: int | None = Field(None, ge=-1, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens less likely than min_p times the likeliest.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Subtracted from tokens in the output.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Subtracted per occurrence in the output.")
    repetition_penalty: float | None = Field(None, gt=0, description="Weakens tokens in prompt or output.")
    seed: int | None = Field(None, description="Same seed, same tokens.")
    stop: str | list[str] | None = Field(None, description="Strings that end the answer.")
    cache_salt: str | None = Field(None, min_length=1, description="Only requests of equal salt share prefix blocks.")
    priority: Priority | None = Field(None, description="Lower goes first, where the engine schedules by priority.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further names for the template.")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
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
        if isinstance(choice, NamedChoice) and choice.name not in names:
            raise InvalidRequestError(f"{choice.name!r} is not one of the tools", param="tool_choice.name")
        if self.metadata and (len(self.metadata) > 16 or any(len(v) > 512 for v in self.metadata.values())):
            raise InvalidRequestError("at most 16 entries of at most 512 characters", param="metadata")
        if isinstance(self.input, list) and not self.input and self.previous_response_id is None:
            raise InvalidRequestError("the conversation is empty", param="input")
        return self

    @property
    def items(self) -> list[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem]:
        """The input as items, whichever form was sent."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def wants_summary(self) -> bool:
        """Whether thoughts are shown as summaries."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)
