"""The body of a chat: what each dialect of conversations states its own request as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.api.chat.custom_tools import NamedTextTool
from app.api.chat.generation_body import IGNORED_EVERYWHERE, REFUSED_EVERYWHERE, GenerationBody
from app.api.chat.messages import THINKING_NAMES, ChatMessage, ChatOptions, ReasoningEffort, Verbosity
from app.api.chat.tools import AllowedTools, AnyNamedTool, AnyTool, NamedTool, ToolChoice
from app.bounds import Count, Items, JsonObject, Metadata, Text
from app.errors import InvalidRequestError
from app.parsers.answer import ToolMode, ToolOptions


class ChatRequest(GenerationBody):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "audio": "audio output is not supported",
        "function_call": "deprecated by OpenAI; use tool_choice",
        "functions": "deprecated by OpenAI; use tools",
        "web_search_options": "web search is not supported",
        "moderation": "moderation is not supported",
        "best_of": "only on /v1/completions",
    }

    ignored: ClassVar[Mapping[str, str]] = {
        **IGNORED_EVERYWHERE,
        "prediction": "the answer is what it would be without",
        "prompt_cache_options": "prefixes are always cached",
        "prompt_cache_retention": "prefixes are always cached",
    }

    messages: Items[ChatMessage] = Field(min_length=1, description="The conversation so far.")
    tools: Items[AnyTool] | None = Field(None, description="Functions and custom tools the model may call.")
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto, required, a named tool, or allowed_tools; auto when there are tools."
    )
    parallel_tool_calls: bool = Field(True, description="False keeps only the first call of an answer.")
    include_reasoning: bool = Field(True, description="False leaves the model's reasoning out of the answer.")
    max_completion_tokens: Count | None = Field(None, ge=1, description="Same as max_tokens, and stronger.")
    logprobs: bool = Field(False, description="Report the logprob of each token.")
    top_logprobs: Count = Field(
        0, ge=-1, description="Most likely tokens to report a position, -1: all of the vocabulary; needs logprobs."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="Given to chat templates that use it; those that can be told whether to think are told no by none, "
        "and yes by all others. A template that knows neither is as it was.",
    )
    verbosity: Verbosity | None = Field(None, description="Given to chat templates that use it.")
    modalities: Items[Literal["text"]] | None = Field(None, description="Only text.")

    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant's turn begins.")
    continue_final_message: bool = Field(False, description="Leave the last message open and continue it.")
    echo: bool = Field(False, description="Put the last message's text before the answer's, if it is the assistant's.")
    add_special_tokens: bool = Field(False, description="Add the tokenizer's special tokens besides the template's.")
    documents: Items[JsonObject] | None = Field(None, description="Documents for the template.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")
    chat_template: Text | None = Field(
        None, min_length=1, max_length=1 << 18, description="Jinja template to use; only where the server allows it."
    )

    store: bool | None = Field(
        None, description="Keep the answer for GET /v1/chat/completions/{id}; it then says whether it was kept."
    )
    metadata: Metadata | None = Field(None, description="Kept with the answer, where it is; lists are filtered by it.")
    prompt_cache_key: str | None = Field(
        None, description="Names the session for routing policies that keep one together; prefixes are always cached."
    )

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.tools is None and self.tool_choice is None:
            return self
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

    def tool_options(self) -> ToolOptions | None:
        """The tools that may be called and how; None when none may."""
        choice = self.tool_choice or "auto"
        if not self.tools or choice == "none":
            return None
        names = {tool.name for tool in self._chosen()} or {tool.name for tool in self.tools}
        chosen = [tool for tool in self.tools if tool.name in names]
        mode: ToolMode = choice if isinstance(choice, str) else "required"
        if isinstance(choice, AllowedTools):
            mode = choice.allowed_tools.mode
        return ToolOptions(
            {tool.name: tool.schema_of_arguments for tool in chosen},
            mode,
            frozenset(tool.name for tool in chosen if tool.is_strict),
            self.parallel_tool_calls and not self._is_named,
            frozenset(tool.name for tool in chosen if tool.type == "custom"),
            {tool.name: tool.grammar for tool in chosen if tool.grammar is not None},
        )

    @property
    def _is_named(self) -> bool:
        """True if the choice is one tool."""
        return isinstance(self.tool_choice, NamedTool | NamedTextTool)

    def calls_finish_reason(self) -> Literal["stop", "tool_calls"]:
        """Tells how an answer with calls ends: a named choice leaves the model nothing to decide, so that is a stop."""
        return "stop" if self._is_named else "tool_calls"

    def asks_to_think(self, names: Mapping[str, Any]) -> bool | None:
        """Says whether the client, by what its template may read, asks the model to think, or not to; None: neither."""
        said = [bool(names[name]) for name in THINKING_NAMES if name in names]
        return any(said) if said else None

    def continued_text(self) -> str | None:
        """The text of the assistant's message that the answer continues; None when it begins one."""
        return self.messages[-1].text() if self.continue_final_message else None

    def echoed_text(self) -> str:
        """Returns the text that goes before the answer's; "" where none does."""
        last = self.messages[-1]
        return last.text() if self.echo and last.role == "assistant" else ""

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
        """The client's names of the fields, for errors."""
        names = {**super().field_names(), "prompt": "messages", "logprobs": "top_logprobs"}
        offered = self.tool_options()
        if offered is not None and (offered.mode == "required" or (offered.strict and self.response_format is None)):
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
