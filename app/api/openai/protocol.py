"""Bodies of the OpenAI dialect besides chats and responses: completions, and counting tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from app.api.chat.generation_body import REFUSED_EVERYWHERE, GenerationBody
from app.api.chat.messages import ChatMessage
from app.api.chat.tools import AnyTool
from app.api.http.prompt_field import PromptField
from app.api.http.strict_models import StrictModel
from app.bounds import Count, Items, JsonObject, Text, TokenIds
from app.errors import InvalidRequestError, UnsupportedError


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions."""

    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "suffix": "insertion is not supported",
        "prompt_embeds": "not supported yet",
    }

    prompt: PromptField = Field(description="A text, token ids, or a list of either.")
    max_tokens: Count | None = Field(16, ge=0, description="Most tokens to generate; 0 only with echo.")
    echo: bool = Field(False, description="Put the prompt before the completion.")
    best_of: Count | None = Field(
        None, ge=1, description="Make so many choices and answer with the n most likely; the width of a beam search."
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
        """True if more choices are made than are shown."""
        return not self.use_beam_search and self.best_of not in (None, self.n)

    def field_names(self) -> dict[str, str]:
        """The client's names of the fields, for errors."""
        return super().field_names() | ({"n": "best_of"} if self.best_of not in (None, self.n) else {})

    def sampling_fields(self) -> dict[str, Any]:
        """SamplingParams' fields; echo with logprobs scores the prompt, max_tokens=0 costs one unseen token."""
        fields = super().sampling_fields()
        if self.must_rank:
            fields |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        if self.echo and self.logprobs is not None:
            wanted = self.logprobs, self.prompt_logprobs or 0
            fields["prompt_logprobs"] = -1 if -1 in wanted else max(wanted)
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


class TokenizeRequest(StrictModel):
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


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    tokens: TokenIds = Field(description="Token ids.")
    skip_special_tokens: bool = Field(False, description="Leave special tokens out of the text.")
