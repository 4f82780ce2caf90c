"""Sampling parameters: one frozen pydantic model, which HTTP bodies inherit.

Every number has a range, wide enough for any use and narrow enough that nothing made of it overflows fp32: logits of
thousands, divided and multiplied by the extremes below, stay far from 3e38.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from app.bounds import MAX_ITEMS, Count, Int64, ItemTuple, Text
from app.records.params import Params
from app.records.repetition_detection import RepetitionDetection
from app.structured.structured_outputs import StructuredOutputs

__all__ = ["MAX_SEED", "SamplingParams", "StructuredOutputs"]

MAX_SEED = (1 << 63) - 1
MAX_THINKING = 1 << 31
MAX_TEMPERATURE = 1e4  # at which any vocabulary is sampled from evenly
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-4, 1e4
MAX_LOGIT_BIAS = 100.0
MAX_TOKEN_IDS = 1 << 20  # in a list; more than any vocabulary holds
MAX_LOGPROB_TOKEN_IDS = 128  # as at vLLM

Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]


class SamplingParams(Params):
    """Says how the tokens of a request are chosen and when it ends. Meanings and defaults are vLLM's."""

    n: Count = Field(1, ge=1, description="Choices to generate for the prompt.")
    temperature: float = Field(1.0, ge=0.0, le=MAX_TEMPERATURE, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Keep the smallest set of tokens with this probability.")
    top_k: Count = Field(0, ge=-1, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="Drop tokens less likely than min_p times the most likely.")
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Subtracted once from tokens already in the output."
    )
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="Subtracted per occurrence in the output.")
    repetition_penalty: float = Field(
        1.0,
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="Divides positive and multiplies negative logits of tokens in prompt or output.",
    )
    logit_bias: dict[Int64, Bias] | None = Field(
        None, max_length=MAX_ITEMS, description="Added to the logits of these token ids, -100 to 100 each."
    )
    allowed_token_ids: ItemTuple[Int64] | None = Field(
        None, max_length=MAX_TOKEN_IDS, description="Only these token ids may be chosen."
    )
    bad_words: ItemTuple[Text] = Field((), description="Words that must not be produced.")
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED, description="Same seed, same tokens.")
    max_tokens: Count | None = Field(
        None, ge=1, description="Most tokens to generate; what the context holds when None."
    )
    min_tokens: Count = Field(0, ge=0, description="Tokens to generate before any stop condition counts.")
    stop: ItemTuple[Text] = Field((), description="Strings that end the output.")
    stop_token_ids: ItemTuple[Int64] = Field((), description="Token ids that end the output, besides the model's own.")
    include_stop_str_in_output: bool = Field(False, description="Keep the stop string in the text.")
    ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    logprobs: Count | None = Field(None, ge=-1, description="Most likely tokens to report a position; -1 is all.")
    prompt_logprobs: Count | None = Field(None, ge=-1, description="The same for the prompt's tokens.")
    logprob_token_ids: ItemTuple[Int64] | None = Field(
        None,
        min_length=1,
        max_length=MAX_LOGPROB_TOKEN_IDS,
        description="Report these token ids at every position, in this order, instead of the most likely ones; needs "
        "logprobs.",
    )
    thinking_token_budget: int | None = Field(
        None,
        ge=-1,
        le=MAX_THINKING,
        description="Most tokens of reasoning, which is then closed; -1: any number.",
    )
    repetition_detection: RepetitionDetection | None = Field(
        None,
        description='End an answer that goes in circles, with stop_reason "repetition_detected" and, unlike vLLM, '
        'finish_reason "stop", which every SDK knows.',
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="A JSON schema, regular expression, choice, grammar or structural tag the text must match."
    )

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("allowed_token_ids")
    @classmethod
    def _some_allowed(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and not value:
            raise ValueError("must name at least one token id")
        return value if value is None else tuple(dict.fromkeys(value))

    @field_validator("logprob_token_ids")
    @classmethod
    def _only_with_logprobs(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        """`logprobs` is declared, hence known, before it; in some dialects it is a flag."""
        if value is None:
            return None
        asked = info.data.get("logprobs")
        if asked is None or asked is False:
            raise ValueError("is only allowed with logprobs")
        return tuple(dict.fromkeys(value))

    @field_validator("min_tokens")
    @classmethod
    def _room_for_min_tokens(cls, value: int, info: ValidationInfo) -> int:
        """A field's validator, so that the error names the field; `max_tokens` is declared, hence known, before it."""
        most = info.data.get("max_tokens")
        if most and value > most:  # 0 is a dialect's way to generate nothing
            raise ValueError(f"{value} is more than max_tokens={most}")
        return value
