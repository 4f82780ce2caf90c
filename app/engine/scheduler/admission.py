"""The engine's entry: an EngineRequest is checked against the model and the cache, and becomes a Request.

Everything that could go wrong for one request only is found here, as an error that names the field, before the
request can meet others (I7). Nothing here touches the scheduler's state, so any thread may call it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence

import numpy as np

from app.engine.kv_cache.block_hash import root_hash
from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.pooling.info import PoolingInfo
from app.engine.pooling.params import PoolingParams
from app.engine.request import EngineRequest, Request
from app.engine.sampling_params import MAX_SEED, SamplingParams
from app.engine.structured.compiler import GrammarCompiler
from app.engine.structured.matcher import Matcher
from app.engine.structured.reasoning import ReasoningSpan
from app.errors import InvalidRequestError, PromptTooLongError, UnsupportedError

MAX_BAD_WORDS_TOKENS = 16_384  # per request


class Admission:
    """Limits of one engine; `admit` is a pure function of them and the request."""

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        model: str,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        block_hash_key: bytes,
        grammars: GrammarCompiler | None = None,
        pooling: PoolingInfo | None = None,
    ) -> None:
        self._kv = kv
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._block_hash_key = block_hash_key
        self._grammars = grammars
        self._pooling = pooling
        self.max_model_len = max_model_len
        self.max_kv_tokens = kv.pool.num_blocks * kv.block_size
        self.max_total_tokens = min(max_model_len, self.max_kv_tokens)

    def admit(self, request: EngineRequest) -> Request:
        """A Request ready to be scheduled. A new grammar is compiled here, which takes milliseconds, or seconds when
        many are waiting for it.

        Raises InvalidRequestError naming the field, PromptTooLongError with the length asked for and the limit.
        """
        params = request.sampling_params
        self._check_prompt(request.prompt_token_ids)
        self._check_kind(request.pooling_params)
        self._check_params(params)
        self._check_bad_words(request.bad_words_token_ids)
        self._check_some_allowed(params, request.bad_words_token_ids)
        pools = request.pooling_params is not None
        max_tokens = self._max_tokens(len(request.prompt_token_ids), params, pools)
        seed = params.seed if params.seed is not None else secrets.randbelow(MAX_SEED)
        if (seed, max_tokens) != (params.seed, params.max_tokens):
            params = params.model_copy(update={"seed": seed, "max_tokens": max_tokens})
        matcher = self._matcher(params, request.reasoning)
        if matcher is not None:  # from now on the grammar is the matcher's; the device has no use for its text
            params = params.model_copy(update={"structured_outputs": None})
        admitted = Request(
            request_id=request.request_id,
            sampling_params=params,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            max_total_tokens=len(request.prompt_token_ids) + max_tokens,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids),
            root_hash=root_hash(self._block_hash_key, model=self._model, cache_root=request.cache_root),
            choice_index=request.choice_index,
            bad_words_token_ids=request.bad_words_token_ids,
            priority=request.priority,
            pooling_params=request.pooling_params,
            thinking_budget=request.thinking_budget,
            needs_all_tokens=self._needs_all_tokens(request.pooling_params),
            matcher=matcher,
            # The API layer's clock is another machine's: only the time already spent is taken from it.
            arrival=time.monotonic() - max(0.0, time.time() - request.arrival_time),
        )
        self._kv.hash_prompt(admitted)
        return admitted

    def _check_kind(self, pooling: PoolingParams | None) -> None:
        """A model that gives vectors takes no other requests, and the other way round."""
        if self._pooling is None:
            if pooling is not None:
                raise UnsupportedError("the model generates text; it gives no embeddings and scores", param="model")
        elif pooling is None:
            raise UnsupportedError("the model gives embeddings or scores; it generates no text", param="model")
        else:
            self._pooling.check(pooling)

    def _needs_all_tokens(self, pooling: PoolingParams | None) -> bool:
        if pooling is None or self._pooling is None:
            return False
        return self._pooling.needs_all_tokens or pooling.task == "token_embed"

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not len(token_ids):
            raise InvalidRequestError("prompt: must hold at least one token", param="prompt")
        try:
            array = np.asarray(token_ids)
        except (ValueError, OverflowError) as error:
            raise InvalidRequestError("prompt: must be a list of token ids", param="prompt") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidRequestError("prompt: must be a list of token ids", param="prompt")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(
                f"prompt: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})", param="prompt"
            )

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids(params.logit_bias or (), "logit_bias")
        self._check_ids(params.logprob_token_ids or (), "logprob_token_ids")
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, field)
            if wanted is not None and wanted > self._vocab_size:
                raise InvalidRequestError(
                    f"{field}: {wanted} is more than the vocabulary holds ({self._vocab_size})", param=field
                )

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

    def _check_some_allowed(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> None:
        """There must be a token to choose from, whatever the output: none of the beginnings of bad words may be one
        after which every allowed token would complete a bad word (or end the output too soon)."""
        if params.allowed_token_ids is None:
            return
        allowed = set(params.allowed_token_ids)
        words = [word for word in bad_words if allowed.issuperset(word)]
        ends = allowed.intersection((*self._eos_token_ids, *params.stop_token_ids)) if params.min_tokens else set()
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

    def _matcher(self, params: SamplingParams, reasoning: ReasoningSpan | None) -> Matcher | None:
        """The start of the request's grammar, if it has one."""
        if params.structured_outputs is None:
            return None
        if params.allowed_token_ids is not None:
            raise InvalidRequestError("allowed_token_ids: excludes structured_outputs", param="allowed_token_ids")
        if self._grammars is None:
            raise UnsupportedError("structured_outputs: this engine has no grammars", param="structured_outputs")
        return self._grammars.matcher(params.structured_outputs, reasoning)

    def _check_ids(self, token_ids: Collection[int], field: str) -> None:
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"{field}: token id {token_id} is outside the vocabulary (0 to {self._vocab_size - 1})", param=field
                )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams, pools: bool) -> int:
        """Tokens the request may generate: what it asks for, or the room that is left. One that `pools` needs none,
        though it counts as if it were to draw one, which nobody computes."""
        limit, room = self.max_total_tokens, self.max_total_tokens - num_prompt_tokens
        what = "the model's context" if limit == self.max_model_len else "the KV cache"
        if pools and room >= 0:
            return 1
        if pools:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, but {what} holds {limit}; truncate_prompt_tokens would cut"
                " it",
                param="prompt",
            )
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, but {what} holds {limit}, of which one at least is"
                " needed for the answer",
                param="prompt",
            )
        wanted = params.max_tokens if params.max_tokens is not None else max(room, params.min_tokens)
        if wanted > room:
            field = "max_tokens" if params.max_tokens is not None else "min_tokens"
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and {field} asks for {wanted} more,"
                f" {num_prompt_tokens + wanted} in all, but {what} holds {limit}",
                param=field,
            )
        return wanted


def _ends_with(output: tuple[int, ...], tail: tuple[int, ...]) -> bool:
    return len(tail) <= len(output) and output[len(output) - len(tail) :] == tail
