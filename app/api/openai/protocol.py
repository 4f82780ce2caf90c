"""Bodies of the OpenAI dialect. They inherit SamplingParams, so a sampling parameter is declared once.

Closed: an unknown field is a 400 that names it. A field of the dialect that cannot be honoured is refused by name;
the few that change nothing about the answer (`user`, `metadata`, ...) are accepted and listed as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.openai.beam_fields import check_beam_fields
from app.api.openai.closed import Closed, FirstFault
from app.api.openai.custom_tools import NamedTextTool
from app.api.openai.messages import ChatMessage, ChatOptions, ReasoningEffort, TextPart, Verbosity
from app.api.openai.response_format import ResponseFormat
from app.api.openai.tools import AllowedTools, AnyNamedTool, AnyTool, NamedTool, ToolChoice
from app.api.parsers.answer import Offer, ToolMode
from app.bounds import Count, Items, JsonObject, Metadata, Text, TokenIds
from app.engine.beam_search import EarlyStopping
from app.engine.request import Priority
from app.engine.sampling_params import SamplingParams
from app.errors import InvalidRequestError, UnsupportedError


class StreamOptions(Closed):
    """What a stream reports besides text."""

    include_usage: bool = Field(False, description="A last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(False, description="Usage so far in every chunk.")
    include_obfuscation: bool = Field(False, description="Padding against traffic analysis: only false.")

    @field_validator("include_obfuscation")
    @classmethod
    def _no_obfuscation(cls, value: bool) -> bool:
        if value:
            raise PydanticCustomError("unsupported", "include_obfuscation is not supported")
        return value


REFUSED_EVERYWHERE = {
    **{f"guided_{kind}": f"removed; use structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")},
    "guided_decoding_backend": "there is one backend",
    "guided_whitespace_pattern": "removed; use structured_outputs.whitespace_pattern",
    "kv_transfer_params": "KV transfer is not supported yet",
    "ec_transfer_params": "there is no encoder cache to transfer",
    "media_io_kwargs": "the model reads text only",
    "mm_processor_kwargs": "the model reads text only",
    "return_prompt_text": "not supported; see echo and return_token_ids",
    "return_token_offsets": "not supported; see logprobs.text_offset of /v1/completions",
    "vllm_xargs": "there are no plugins to give them to",
    "watermarking": "not supported",
}


class GenerationBody(FirstFault, SamplingParams):
    """What both ways of asking for text have in common, beyond SamplingParams."""

    refused: ClassVar[dict[str, str]] = REFUSED_EVERYWHERE

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    stream: bool = Field(False, description="Answer as server-sent events while tokens come.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    stream_interval: int = Field(1, ge=1, le=1024, description="Tokens of a choice that one chunk gathers.")
    truncate_prompt_tokens: Count | None = Field(
        None, ge=-1, description="Keep only the last so many prompt tokens; -1: as many as the context holds."
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="Where truncate_prompt_tokens cuts: what comes first goes, or what comes last."
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Logprobs call tokens token_id:N, so that no two have one name."
    )
    spaces_between_special_tokens: Literal[True] = Field(True, description="Only true, which is as they are.")
    session_id: str | None = Field(
        None, min_length=1, description="Names the session, for routing policies that keep one on a replica."
    )
    return_token_ids: bool = Field(False, description="Add token_ids to each choice and prompt_token_ids.")
    priority: Priority = Field(0, description="Lower goes first, where the engine schedules by priority.")
    cache_salt: str | None = Field(None, min_length=1, description="Only requests of equal salt share prefix blocks.")
    request_id: str | None = Field(None, description="Echoed as x-request-id.", pattern=r"^[\x21-\x7e]{1,256}$")

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema or structural_tag; excludes structured_outputs."
    )
    use_beam_search: bool = Field(
        False, description="The n best beams of a search instead of samples; not with stream or what would sample."
    )
    length_penalty: float = Field(
        1.0, ge=-10.0, le=10.0, description="Beams are ranked by logprob / tokens ** this; above 0 favours long ones."
    )
    early_stopping: EarlyStopping = Field(
        False,
        description="Beams: true ends once enough have finished, false when no other looks better at its present "
        'length, "never" when none can become better.',
    )
    user: str | None = Field(None, description="Accepted; changes nothing.")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """Null means not given, as SDKs send it; refuse by name what is known but not supported."""
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in given.keys() & cls.refused.keys():
            raise UnsupportedError(f"{name}: {cls.refused[name]}", param=name)
        return {name: value for name, value in given.items() if name not in cls.refused}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true", param="stream_options")
        if self.stream_interval > 1 and not self.stream:
            raise InvalidRequestError("is only allowed with stream=true", param="stream_interval")
        if "truncation_side" in self.model_fields_set and self.truncate_prompt_tokens is None:
            raise InvalidRequestError("is only allowed with truncate_prompt_tokens", param="truncation_side")
        if self.return_tokens_as_token_ids and (self.logprobs is None or self.logprobs is False):
            raise InvalidRequestError("is only allowed with logprobs", param="return_tokens_as_token_ids")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("must be -1 or at least 1", param="truncate_prompt_tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedError("prompt_logprobs is not available with stream=true", param="prompt_logprobs")
        if self.response_format is not None and self.structured_outputs is not None:
            raise InvalidRequestError("excludes structured_outputs", param="response_format")
        check_beam_fields(self)
        return self

    @property
    def beam_width(self) -> int | None:
        """Beams of a search; None without one."""
        return self.n if self.use_beam_search else None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of SamplingParams, by name; dialects that mean something else by one translate it here."""
        fields = {name: getattr(self, name) for name in SamplingParams.model_fields}
        if self.response_format is not None:
            fields["structured_outputs"] = self.response_format.structured_outputs()
        return fields

    def field_names(self) -> dict[str, str]:
        """What this dialect calls a field of SamplingParams, or the prompt, where it has a word of its own."""
        return {} if self.response_format is None else {"structured_outputs": "response_format"}


class Prediction(Closed):
    """What much of the answer is expected to say."""

    type: Literal["content"]
    content: Text | Items[TextPart]


class ChatRequest(GenerationBody):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[dict[str, str]] = {
        **REFUSED_EVERYWHERE,
        "audio": "audio output is not supported",
        "function_call": "deprecated by OpenAI; use tool_choice",
        "functions": "deprecated by OpenAI; use tools",
        "web_search_options": "web search is not supported",
        "moderation": "moderation is not supported",
        "echo": "only on /v1/completions",
        "best_of": "only on /v1/completions",
    }

    messages: Items[ChatMessage] = Field(min_length=1, description="The conversation so far.")
    tools: Items[AnyTool] | None = Field(None, description="Functions and custom tools the model may call.")
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto, required, a named tool, or allowed_tools; auto when there are tools."
    )
    parallel_tool_calls: bool = Field(True, description="False keeps only the first call of an answer.")
    include_reasoning: bool = Field(True, description="False leaves the model's thoughts out of the answer.")
    max_completion_tokens: Count | None = Field(None, ge=1, description="Same as max_tokens, and stronger.")
    logprobs: bool = Field(False, description="Report the logprob of each token.")
    top_logprobs: Count = Field(0, ge=0, description="Most likely tokens to report a position; needs logprobs.")
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="Given to chat templates that use it; those that can be told whether to think are told no by none, "
        "and yes by all others. A template that knows neither is as it was.",
    )
    verbosity: Verbosity | None = Field(None, description="Given to chat templates that use it.")
    prediction: Prediction | None = Field(
        None, description="Predicted output. Accepted; the answer is what it would be without."
    )
    modalities: Items[Literal["text"]] | None = Field(None, description="Only text.")

    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant's turn begins.")
    continue_final_message: bool = Field(False, description="Leave the last message open and continue it.")
    add_special_tokens: bool = Field(False, description="Add the tokenizer's special tokens besides the template's.")
    documents: Items[JsonObject] | None = Field(None, description="Documents for the template.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")
    chat_template: Text | None = Field(
        None, min_length=1, max_length=1 << 18, description="Jinja template to use; only where the server allows it."
    )

    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    metadata: Metadata | None = Field(None, description="Accepted; changes nothing.")
    service_tier: str | None = Field(None, description="Accepted; there is one tier.")
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: str | None = Field(
        None, description="Names the session for routing policies that keep one together; prefixes are always cached."
    )
    prompt_cache_retention: str | None = Field(None, description="Accepted; prefixes are always cached.")
    prompt_cache_options: JsonObject | None = Field(None, description="Accepted; prefixes are always cached.")

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.name for tool in self.tools or ()]
        if len(names) != len(set(names)):
            double = next(name for name in names if names.count(name) > 1)
            raise InvalidRequestError(f"two tools are called {double!r}", param="tools")
        if not names and self.tool_choice not in (None, "none"):
            raise InvalidRequestError("is only allowed with tools", param="tool_choice")
        known = {(tool.type, tool.name) for tool in self.tools or ()}
        for tool in self._chosen():
            if (tool.type, tool.name) not in known:
                raise InvalidRequestError(f"there is no {tool.type} tool called {tool.name!r}", param="tool_choice")
        return self

    def _chosen(self) -> Sequence[AnyNamedTool]:
        """The tools that the choice names, [] when it names none."""
        if isinstance(self.tool_choice, NamedTool | NamedTextTool):
            return [self.tool_choice]
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.tools
        return []

    def offer(self) -> Offer | None:
        """The tools that may be called and how; None when none may."""
        choice = self.tool_choice or "auto"
        if not self.tools or choice == "none":
            return None
        names = {tool.name for tool in self._chosen()} or {tool.name for tool in self.tools}
        chosen = [tool for tool in self.tools if tool.name in names]
        mode: ToolMode = choice if isinstance(choice, str) else "required"
        if isinstance(choice, AllowedTools):
            mode = choice.allowed_tools.mode
        return Offer(
            {tool.name: tool.schema_of_arguments for tool in chosen},
            mode,
            frozenset(tool.name for tool in chosen if tool.is_strict),
            self.parallel_tool_calls and not self._is_named,
            frozenset(tool.name for tool in chosen if tool.type == "custom"),
            {tool.name: tool.grammar for tool in chosen if tool.grammar is not None},
        )

    @property
    def _is_named(self) -> bool:
        """Whether the choice is one tool."""
        return isinstance(self.tool_choice, NamedTool | NamedTextTool)

    def calls_finish_reason(self) -> Literal["stop", "tool_calls"]:
        """How an answer with calls ends: a named choice leaves the model nothing to decide, so that is a stop."""
        return "stop" if self._is_named else "tool_calls"

    def continued_text(self) -> str | None:
        """The text of the assistant's message that the answer continues; None when it begins one."""
        return self.messages[-1].text() if self.continue_final_message else None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise InvalidRequestError("excludes add_generation_prompt", param="continue_final_message")
        return self

    def sampling_fields(self) -> dict[str, Any]:
        """SamplingParams' fields: logprobs is a count there, max_completion_tokens is max_tokens."""
        logprobs = self.top_logprobs if self.logprobs else None
        max_tokens = self.max_completion_tokens or self.max_tokens
        return {**super().sampling_fields(), "logprobs": logprobs, "max_tokens": max_tokens}

    def field_names(self) -> dict[str, str]:
        """The words for errors: those that the client used."""
        names = {**super().field_names(), "prompt": "messages", "logprobs": "top_logprobs"}
        offer = self.offer()
        if offer is not None and (offer.mode == "required" or (offer.strict and self.response_format is None)):
            names["structured_outputs"] = "tools"
        return names | ({"max_tokens": "max_completion_tokens"} if self.max_completion_tokens else {})

    def chat_options(self) -> ChatOptions:
        """The part that becomes the prompt."""
        names = ChatOptions.model_fields
        options = {name: getattr(self, name) for name in names}
        if self.tool_choice == "none":  # the surest way not to be called is not to be offered
            options["tools"] = None
        elif isinstance(self.tool_choice, AllowedTools):
            allowed = {tool.name for tool in self._chosen()}
            options["tools"] = [tool for tool in self.tools or () if tool.name in allowed]
        return ChatOptions.model_construct(**options)


def _prompt_kind(value: Any) -> str:
    """Which of the four forms a prompt has, by its first element."""
    if not isinstance(value, list) or not value:
        return "text"
    first = value[0]
    if isinstance(first, str):
        return "texts"
    return "batches" if isinstance(first, list) else "ids"


PromptField = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Items[Text], Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Items[TokenIds], Tag("batches")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions."""

    refused: ClassVar[dict[str, str]] = {
        **REFUSED_EVERYWHERE,
        "suffix": "insertion is not supported",
        "prompt_embeds": "not supported yet",
    }

    prompt: PromptField = Field(description="A text, token ids, or a list of either.")
    max_tokens: Count | None = Field(16, ge=0, description="Most tokens to generate; 0 only with echo.")
    echo: bool = Field(False, description="Put the prompt before the completion.")
    best_of: Count | None = Field(
        None, ge=1, description="Make so many choices and answer with the n likeliest; the width of a beam search."
    )
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens, mostly a bos.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"{self.best_of} is less than n={self.n}", param="best_of")
        if self.stream and self.best_of not in (None, self.n):
            raise UnsupportedError("what is best is known at the end: not with stream=true", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens=0 is only allowed with echo", param="max_tokens")
        return self

    @property
    def beam_width(self) -> int | None:
        """Beams of a search; None without one."""
        return (self.best_of or self.n) if self.use_beam_search else None

    @property
    def must_rank(self) -> bool:
        """Whether more choices are made than are shown."""
        return not self.use_beam_search and self.best_of not in (None, self.n)

    def field_names(self) -> dict[str, str]:
        """The words for errors: those that the client used."""
        return super().field_names() | ({"n": "best_of"} if self.best_of not in (None, self.n) else {})

    def sampling_fields(self) -> dict[str, Any]:
        """SamplingParams' fields; echo with logprobs scores the prompt, max_tokens=0 costs one unseen token."""
        fields = super().sampling_fields()
        if self.must_rank:
            fields |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.max_tokens == 0:
            fields |= {"max_tokens": 1, "min_tokens": 0}
        return fields

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever form was sent."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TokenizeRequest(Closed):
    """Body of POST /tokenize: a prompt, or the fields of a chat."""

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    prompt: Text | None = Field(None, description="A text.")
    messages: Items[ChatMessage] | None = Field(None, min_length=1, description="A conversation instead of a text.")
    tools: Items[AnyTool] | None = Field(None, description="Tools the model may call.")
    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant's turn begins.")
    continue_final_message: bool = Field(False, description="Leave the last message open.")
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for a chat.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")
    return_token_strs: bool = Field(False, description="Add the text of each token.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(Closed):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    tokens: TokenIds = Field(description="Token ids.")
    skip_special_tokens: bool = Field(False, description="Leave special tokens out of the text.")
