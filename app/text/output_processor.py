"""From an engine's tokens to what the client sees (invariant I4).

Detokenises, looks for stop strings (only after `min_tokens`), truncates text, token ids and logprobs at the stop, and
owns the finish reason. `must_abort` says that the engine still runs a request that has ended here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from app.records.outputs import CompletionOutput, EngineOutput, FinishReason
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from app.text.detokenizer import create_detokenizer
from app.text.repetition import REPETITION, RepetitionFinder
from app.text.stop_strings import StopStrings
from app.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextDelta:
    """Holds what one EngineOutput adds to a choice. The one with a `finish_reason` is the last.

    `text` may lag behind the tokens: half characters and possible beginnings of stop strings wait.
    """

    text: str
    output: EngineOutput  # with the tokens up to the stop
    text_offsets: list[int] | None = None  # with logprobs: where each token's text begins in the choice's text
    finish_reason: FinishReason | None = None  # of the choice: the engine may know of none yet, or of another one
    stop_reason: int | str | None = None
    must_abort: bool = False

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return self.output.new_token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One per new token, where asked for."""
        return self.output.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The whole prompt's, once."""
        return self.output.prompt_logprobs

    def add_to(self, output: CompletionOutput) -> None:
        """Append this delta to a choice that is being collected."""
        output.say(self.text, is_last=self.finish_reason is not None)
        output.append(self.output)
        output.finish_reason = self.finish_reason
        output.stop_reason = self.stop_reason

    def after(self, earlier: Sequence[TextDelta]) -> TextDelta:
        """This delta with earlier ones in front of it, which did not end the choice."""
        all_of = (*earlier, self)
        has_offsets = any(one.text_offsets is not None for one in all_of)
        return replace(
            self,
            text="".join(one.text for one in all_of),
            output=self.output.after([one.output for one in earlier]),
            text_offsets=[offset for one in all_of for offset in one.text_offsets or ()] if has_offsets else None,
        )


@dataclass(slots=True)
class _Piece:
    """Collects what one EngineOutput has brought so far."""

    texts: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    num_tokens: int = 0


class OutputProcessor:
    """The text side of one choice. Feed it every EngineOutput of the request, in order.

    `shown` are special tokens that something reads in the text, such as a tool parser, so that they are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling_params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        params = sampling_params
        self._detokenizer = create_detokenizer(tokenizer, params.skip_special_tokens, prompt_token_ids, shown)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        circles = params.repetition_detection
        self._repetition = RepetitionFinder(circles, params.min_tokens) if circles is not None else None
        self._show_stop_token = params.include_stop_str_in_output
        self._wants_logprobs = params.logprobs is not None
        # A chat model's end of turn may be known to its tokenizer only; it reaches the engine as a stop token.
        self._eos_token_id = None if params.ignore_eos else tokenizer.eos_token_id
        self._is_plain = self._stops is None and not self._wants_logprobs
        self._num_chars = 0  # detokenised, shown or held
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_right_drafts = self.num_wrong_drafts = 0  # known once the engine has ended the request
        self.finished = False

    def process(self, output: EngineOutput) -> TextDelta:
        """Text and tokens that `output` adds. After the finish nothing is added any more."""
        if self.finished:
            return TextDelta("", EngineOutput(output.request_id, []))
        if self._repetition is not None and output.finish_reason in (None, "length"):
            count = self._repetition.find(output.new_token_ids)
            is_at_limit = output.finish_reason is not None and count == len(output.new_token_ids)
            if count and not is_at_limit:  # the limit of tokens comes first, as at vLLM
                return self._end_circles(output, count)
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self.num_right_drafts, self.num_wrong_drafts = output.num_right_drafts, output.num_wrong_drafts
        token_ids = output.new_token_ids
        if self._is_plain and output.finish_reason is None:  # the common case, a few microseconds shorter
            self.num_output_tokens += len(token_ids)
            text = "".join(map(self._detokenizer.push, token_ids))
            return TextDelta(text, output)
        # A stop token ends the text without being part of it; it still counts as a token.
        num_silent = int(output.finish_reason == "stop" and bool(token_ids) and not self._show_stop_token)
        piece = self._detokenize(token_ids, len(token_ids) - num_silent)
        delta = TextDelta("".join(piece.texts), output)
        if self._stops is not None and self._stops.found is not None:
            delta.output = output.first(piece.num_tokens)
            self._finish(delta, "stop", self._stops.found)
            delta.must_abort = output.finish_reason is None
        elif output.finish_reason is not None:
            self._end(delta, output)
        self.num_output_tokens += len(delta.token_ids)
        if delta.logprobs is not None:
            delta.text_offsets = piece.offsets[: len(delta.token_ids)]
        return delta

    def _end_circles(self, output: EngineOutput, count: int) -> TextDelta:
        """End with the first `count` tokens of `output`, all of which have their text."""
        self._repetition = None
        kept = output.first(count)
        kept.finish_reason = "length"
        delta = self.process(kept)
        if delta.finish_reason == "length":
            delta.finish_reason, delta.stop_reason = "stop", REPETITION
        delta.must_abort = output.finish_reason is None
        return delta

    def _detokenize(self, token_ids: list[int], num_heard: int) -> _Piece:
        """Run tokens through detokenizer and stop strings; tokens from `num_heard` on have no text."""
        piece = _Piece()
        for i in range(num_heard):
            if self._wants_logprobs:
                piece.offsets.append(self._num_chars)
            piece.num_tokens += 1
            text = self._detokenizer.push(token_ids[i])
            self._num_chars += len(text)
            if self._stops is not None:
                text = self._stops.feed(text, countable=self.num_output_tokens + i >= self._min_tokens)
                piece.texts.append(text)
                if self._stops.found is not None:
                    return piece
            else:
                piece.texts.append(text)
        piece.offsets += [self._num_chars] * (len(token_ids) - num_heard)
        return piece

    def _end(self, delta: TextDelta, output: EngineOutput) -> None:
        """The engine ended the request: let go of what was held, unless that completes a stop string."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            delta.text += rest
        else:
            countable = self.num_output_tokens + len(output.new_token_ids) > self._min_tokens
            delta.text += self._stops.feed(rest, countable)
            if self._stops.found is not None:
                self._finish(delta, "stop", self._stops.found)
                return
            delta.text += self._stops.flush()
        stop_reason = None if output.stop_reason == self._eos_token_id else output.stop_reason
        self._finish(delta, output.finish_reason, stop_reason)

    def _finish(self, delta: TextDelta, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        self.finished = True
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
