"""Holds what an engine says about its requests, step by step, and what `LLM` hands to its caller at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import msgspec
import numpy as np

from app.errors import DeadlineError, InvalidRequestError, MantaError
from app.records.step import Float32Array, TokenLogprobs
from app.telemetry.request_record import EngineTimes

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(slots=True)
class PooledResult:
    """An embedding [E], one for each token [T, E], scores [classes], or an alignment (records/alignment_ask.py)."""

    data: bytes  # fp32, little-endian
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Float32Array) -> PooledResult:
        """The bytes of an array."""
        return cls(array.astype("<f4", copy=False).tobytes(), array.shape)

    def array(self) -> Float32Array:
        """The result as an array, which shares the bytes and is read-only."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)


class EngineOutput(msgspec.Struct, omit_defaults=True, gc=False, rename={"request_id": "r", "new_token_ids": "t"}):
    """New tokens of one request. The one with a `finish_reason` is the request's last (I7).

    It crosses the token channels as it is, as msgpack (hence the short names of what every token has); there,
    `request_id` is the channel's name for the request. It holds no reference cycle, so the collector need not look.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it (None for eos and length)
    error: str | None = None  # with finish_reason "error"
    logprobs: list[TokenLogprobs] | None = None  # one per new token, where asked for
    token_figures: dict[str, list[float]] | None = None  # likewise, by name; see EngineRequest.token_figures
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # whole prompt, once; the first entry is None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_right_drafts: int = 0  # with the finish_reason: draft tokens that this replica kept
    num_wrong_drafts: int = 0  # and those that it computed in vain
    num_preemptions: int = 0
    queue_time_s: float = 0.0  # arrival at the engine to first being scheduled; on the first output
    pooled: PooledResult | None = None  # what a pooling request, or an ask, wants of the prompt; on the first output
    bundled: list[PooledResult] | None = None  # instead of `pooled`, of a bundle: those of its prompts, in their order
    times: EngineTimes | None = None  # with the finish_reason, of a request that was scheduled
    error_param: str | None = None  # with `error`: the field of the request that is to blame; None: the engine is
    is_late: bool = False  # with `error`: the request's deadline passed

    def as_error(self) -> MantaError:
        """Returns what the client is told, of an output with `finish_reason` "error"."""
        if self.error_param is not None:
            return InvalidRequestError(str(self.error), param=self.error_param)
        return (DeadlineError if self.is_late else MantaError)(self.error or "the engine failed on this request")

    def first(self, count: int) -> Self:
        """The same with its first `count` tokens and what belongs to them."""
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        figures = self.token_figures
        if figures is not None:
            figures = {name: values[:count] for name, values in figures.items()}
        tokens = self.new_token_ids[:count]
        return msgspec.structs.replace(self, new_token_ids=tokens, logprobs=logprobs, token_figures=figures)

    def after(self, earlier: Sequence[EngineOutput]) -> Self:
        """The same with the tokens of the outputs before it, and what belongs to those, in front."""
        all_of: list[EngineOutput] = [*earlier, self]
        has_logprobs = any(one.logprobs is not None for one in all_of)
        return msgspec.structs.replace(
            self,
            new_token_ids=[token for one in all_of for token in one.new_token_ids],
            logprobs=[entry for one in all_of for entry in one.logprobs or ()] if has_logprobs else None,
            token_figures=_joined([one.token_figures for one in all_of]),
            prompt_logprobs=next((one.prompt_logprobs for one in all_of if one.prompt_logprobs), None),
        )


def _joined(figures: Sequence[dict[str, list[float]] | None]) -> dict[str, list[float]] | None:
    """The figures of tokens that follow one another."""
    some = [one for one in figures if one]
    return {name: [value for one in some for value in one[name]] for name in some[0]} if some else None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a finished (or running) request, with its text, which is there once it has finished."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    token_figures: dict[str, list[float]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _texts: list[str] = field(default_factory=list, repr=False, compare=False)

    def say(self, text: str, is_last: bool) -> None:
        """Add to the text; `is_last`: all of it has come."""
        self._texts.append(text)
        if is_last:
            self.text = "".join((self.text, *self._texts))
            self._texts.clear()

    def append(self, output: EngineOutput) -> None:
        """Add an output's tokens and what belongs to them; text and end are the caller's to write."""
        self.token_ids += output.new_token_ids
        if output.token_figures is not None:
            self.token_figures = _joined([self.token_figures, output.token_figures])
        if output.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += output.logprobs
            total = sum(entry.logprobs[0] for entry in output.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + total


@dataclass(slots=True)
class RequestOutput:
    """Holds what `LLM.generate` returns for each prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True
