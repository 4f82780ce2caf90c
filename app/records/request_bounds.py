"""Bounds what a model, and the KV cache under it, take of a request: the one place where that is checked and settled.

Who makes requests (ingress, `LLM`) asks before anything runs, so that the client is told at once. A single bad one must
not take the others with it (I7): so the engine, which knows its cache for sure, asks again when one arrives, unless the
request says that the very same bounds settled it.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np

from app.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from app.records.bad_words import BadWords
from app.records.encoder_info import EncoderInfo
from app.records.encoder_input import EncoderInput
from app.records.media import MediaAsk
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.sampling_params import MAX_SEED, SamplingParams

MAX_BAD_WORDS_TOKENS = 16_384  # of one request


@dataclass(frozen=True)
class RequestBounds:
    """Limits of one engine, or of all replicas of a model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_kv_tokens: int | None = None  # that the whole KV cache holds; None while unknown
    pooling: PoolingInfo | None = None  # of a model that gives vectors; None: it generates
    max_item_tokens: int = 0  # of a picture or video in a prompt; 0: the model sees nothing
    encoder: EncoderInfo | None = None  # that the model's decoder attends to; None: to none

    @cached_property
    def max_total_tokens(self) -> int:
        """Most tokens, prompt and output together, of one request."""
        return self.max_model_len if self.max_kv_tokens is None else min(self.max_model_len, self.max_kv_tokens)

    @cached_property
    def mark(self) -> bytes:
        """Tells these bounds from others, in any process."""
        own = self.vocab_size, sorted(self.eos_token_ids), self.max_model_len, self.max_kv_tokens
        kept = repr((*own, self.max_item_tokens, self.encoder, self.pooling)).encode()
        return blake2b(kept, digest_size=8).digest()

    @cached_property
    def holder(self) -> str:
        """Names what holds no more than `max_total_tokens`, for errors."""
        return "the model's context" if self.max_total_tokens == self.max_model_len else "the whole KV cache"

    @property
    def reads_text(self) -> bool:
        """True if an encoder reads the prompt, and the decoder begins behind its own start."""
        return self.encoder is not None and self.encoder.kind == "text"

    def settle(self, request: EngineRequest, usual_max_tokens: int | None = None) -> EngineRequest:
        """The request with what it leaves open filled in: a seed, and as `max_tokens` the room that is left, at most
        `usual_max_tokens`. One that is settled comes back as it is.

        Raises InvalidRequestError naming the field, PromptTooLongError with the length asked for and the limit,
        UnsupportedError for what this model does not do.
        """
        if request.settled_by and request.settled_by == self.mark and not request.output_token_ids:
            return request
        self._check_prompt(request.prompt_token_ids)
        if request.asks or self.encoder is not None:
            request = self._with_checked_items(request)
        if request.output_token_ids:
            self._check_output(request)
        work = request.work
        if isinstance(work, PoolingParams):
            self._check_pooling(work, len(request.prompt_token_ids))
            return replace(request, settled_by=self.mark)
        if self.pooling is not None:
            raise UnsupportedError("the model gives embeddings or scores; it generates no text", param="model")
        self._check_params(work)
        bad_words = request.asked(BadWords)
        words = () if bad_words is None else bad_words.token_ids
        if words:
            self._check_bad_words(words)
        if work.allowed_token_ids is not None:
            self._check_some_allowed(work, work.allowed_token_ids, words)
        max_tokens = self._max_tokens(len(request.prompt_token_ids), work, usual_max_tokens)
        if work.seed is None or work.max_tokens != max_tokens:
            seed = secrets.randbelow(MAX_SEED) if work.seed is None else work.seed
            work = work.model_copy(update={"seed": seed, "max_tokens": max_tokens})
        return replace(request, work=work, settled_by=self.mark)

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not len(token_ids):
            raise InvalidRequestError("prompt: is empty; it must hold at least one token", param="prompt")
        try:  # four times as fast as np.asarray, which would take truth values, too
            ids = np.frombuffer(array("q", token_ids if isinstance(token_ids, list) else [*token_ids]), np.int64)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError("prompt: must be a list of token ids", param="prompt") from error
        if isinstance(token_ids[0], bool):
            raise InvalidRequestError("prompt: must be a list of token ids", param="prompt")
        self._check_ids((int(ids.min()), int(ids.max())), "prompt")

    def _with_checked_items(self, request: EngineRequest) -> EngineRequest:
        """The request with its prompt where the model reads it: a text may be the encoder's. What encoders read is
        checked."""
        given = request.asked(EncoderInput)
        if self.encoder is not None and self.reads_text and given is None:
            given = self.encoder.of_text(request.prompt_token_ids, request.cache_root)
            request = replace(request, prompt_token_ids=list(self.encoder.start), asks=(*request.asks, given))
        if (media := request.asked(MediaAsk)) is not None:
            self._check_media(media, len(request.prompt_token_ids))
        self._check_encoder_input(given)
        return request

    def _check_media(self, media: MediaAsk, num_prompt_tokens: int) -> None:
        if not self.max_item_tokens:
            raise UnsupportedError("the model takes text only: no pictures, no videos", param="model")
        media.check(num_prompt_tokens)
        longest = max((item.length for item in media.items), default=0)
        if longest > self.max_item_tokens:
            raise InvalidRequestError(
                f"messages: a picture or video takes {longest} tokens, more than max_item_tokens="
                f"{self.max_item_tokens}: send a smaller one",
                param="messages",
            )

    def _check_encoder_input(self, given: EncoderInput | None) -> None:
        if self.encoder is None:
            if given is not None:
                raise UnsupportedError("the model has no encoder that the request could give something", param="model")
        elif given is None:
            raise UnsupportedError("the model generates from a sound: ask for a transcription", param="model")
        else:
            self.encoder.check(given)

    def _check_output(self, request: EngineRequest) -> None:
        """That of a request which goes on after it has left another replica."""
        generated, most = request.output_token_ids, request.max_tokens
        self._check_ids((min(generated), max(generated)), "output_token_ids")
        if most is None or len(generated) >= most:
            raise InvalidRequestError(
                f"output_token_ids: {len(generated)} tokens leave none of max_tokens={most}", param="output_token_ids"
            )

    def _check_pooling(self, params: PoolingParams, num_prompt_tokens: int) -> None:
        if self.pooling is None:
            raise UnsupportedError("the model generates text; it gives no embeddings and scores", param="model")
        self.pooling.check(params)
        if num_prompt_tokens > self.max_total_tokens:
            raise PromptTooLongError(
                f"prompt: {self.holder} holds {self.max_total_tokens} tokens, but the prompt has {num_prompt_tokens};"
                " truncate_prompt_tokens would cut it",
                param="prompt",
            )

    def _check_params(self, params: SamplingParams) -> None:
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            if token_ids := getattr(params, field):
                self._check_ids(token_ids, field)
        if self.reads_text and params.prompt_logprobs is not None:
            raise UnsupportedError(
                "prompt_logprobs: the model's encoder reads the prompt, whose tokens have no logprobs (so neither has"
                " what echo repeats)",
                param="prompt_logprobs",
            )
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, field)
            if wanted is not None and wanted > self.vocab_size:
                raise InvalidRequestError(
                    f"{field}: {wanted} is more than the vocabulary holds ({self.vocab_size})", param=field
                )
        if params.structured_outputs is not None and params.allowed_token_ids is not None:
            raise InvalidRequestError("allowed_token_ids: excludes structured_outputs", param="allowed_token_ids")

    def _check_ids(self, token_ids: Collection[int], field: str) -> None:
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                last = self.vocab_size - 1
                raise InvalidRequestError(f"{field}: token ids must be from 0 to {last}, not {token_id}", param=field)

    def _check_bad_words(self, words: Sequence[tuple[int, ...]]) -> None:
        for word in words:
            if not 0 < len(word) <= self.max_total_tokens:
                what = f"{len(word)} tokens; from 1 to {self.max_total_tokens} fit what can be generated"
                raise InvalidRequestError(f"bad_words: a word has {what}", param="bad_words")
            self._check_ids(word, "bad_words")
        total = sum(map(len, words))
        if total > MAX_BAD_WORDS_TOKENS:
            most = f"at most {MAX_BAD_WORDS_TOKENS} are compared with the output at every step"
            raise InvalidRequestError(f"bad_words: the words have {total} tokens in all; {most}", param="bad_words")

    def _check_some_allowed(
        self, params: SamplingParams, token_ids: Sequence[int], bad_words: Sequence[tuple[int, ...]]
    ) -> None:
        """There must be a token to choose from, whatever the output: none of the beginnings of bad words may be one
        after which every allowed token would complete a bad word (or end the output too soon)."""
        allowed = set(token_ids)
        words = [word for word in bad_words if allowed.issuperset(word)]
        ends = allowed.intersection((*self.eos_token_ids, *params.stop_token_ids)) if params.min_tokens else set()
        if len(allowed) > len(words) + len(ends):
            return
        for output in {(), *(word[:-1] for word in words)}:
            forbidden = {word[-1] for word in words if _ends_with(output, word[:-1])}
            if forbidden | (ends if len(output) < params.min_tokens else set()) >= allowed:
                raise InvalidRequestError(
                    "allowed_token_ids: all of them can be forbidden at once, by bad_words or, before min_tokens, as an"
                    " end of the output",
                    param="allowed_token_ids",
                )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams, usual: int | None) -> int:
        """Tokens that the request may generate: what it asks for, or the room that is left."""
        limit, asked = self.max_total_tokens, params.max_tokens
        wanted = asked if asked is not None else max(1, params.min_tokens)
        if num_prompt_tokens + wanted <= limit:
            return asked if asked is not None else max(wanted, min(limit - num_prompt_tokens, usual or limit))
        if num_prompt_tokens >= limit:
            field, wanted, what = "prompt", 1, "at least 1 of output"
        elif asked is not None:
            field, what = "max_tokens", f"{asked} of output"
        else:
            field, what = "min_tokens", f"{wanted} of output"
        raise PromptTooLongError(
            f"{field}: {self.holder} holds {limit} tokens, but the request needs {num_prompt_tokens + wanted}:"
            f" {num_prompt_tokens} in the prompt and {what}",
            param=field,
        )


def _ends_with(output: tuple[int, ...], tail: tuple[int, ...]) -> bool:
    return len(tail) <= len(output) and output[len(output) - len(tail) :] == tail
