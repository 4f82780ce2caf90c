"""The engine's entry: an EngineRequest becomes a Request, checked against what only the engine knows.

Everything that could go wrong for one request only is found here, as an error that names the field, before the
request can meet others (I7). Nothing here touches the scheduler's state, so any thread may call it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.errors import InvalidRequestError, UnsupportedError
from app.records.block_hash import root_hash
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.request_bounds import RequestBounds
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams
from app.structured.compiler import GrammarCompiler
from app.structured.matcher import GrammarFailure, Matcher
from app.structured.reasoning import ReasoningSpan


class Admission:
    """`admit` is a pure function of the engine's limits and the request."""

    def __init__(
        self,
        kv: KVCacheManager,
        bounds: RequestBounds,
        *,
        model: str,
        block_hash_key: bytes,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.bounds = replace(bounds, max_kv_tokens=kv.max_tokens)
        self._kv = kv
        self.revision = model  # of the weights
        self._block_hash_key = block_hash_key
        self._grammars = grammars

    def admit(self, request: EngineRequest) -> Request:
        """A Request ready to be scheduled. A new grammar is compiled here, which takes milliseconds, or seconds when
        many are waiting for it, and follows what has been generated elsewhere already.

        Raises what RequestBounds raises, and InvalidRequestError for a grammar that is none.
        """
        request = self.bounds.settle(request)
        prompt, generated = request.prompt_token_ids, request.output_token_ids
        work, max_tokens = request.work, request.max_tokens
        assert max_tokens is not None
        matcher, revision = self._matcher(request), self.revision
        if isinstance(work, SamplingParams) and work.structured_outputs is not None:
            work = work.model_copy(update={"structured_outputs": None})  # from now on the grammar is the matcher's
        asks = tuple(ask for ask in request.asks if not isinstance(ask, ReasoningSpan))
        admitted = Request(
            replace(request, prompt_token_ids=[], output_token_ids=[], work=work, asks=asks),
            token_ids=[*prompt, *generated],
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + max_tokens,
            eos_token_ids=self.bounds.eos_token_ids,
            stop_token_ids=frozenset(work.stop_token_ids if isinstance(work, SamplingParams) else ()),
            root_hash=root_hash(self._block_hash_key, model=revision, cache_root=request.cache_root),
            revision=revision,
            needs_all_tokens=self._needs_all_tokens(work) or request.needs_all_tokens,
            owes_prompt_logprobs=request.wants_prompt_logprobs and not generated,  # they come with the first token
            num_resumed_tokens=len(generated),
            matcher=matcher,
            # The clock of who took it in is another machine's: only the time already spent is taken from it.
            arrival=time.monotonic() - max(0.0, time.time() - request.arrival_time),
        )
        self._kv.hash_known(admitted)
        return admitted

    def renew(self, request: Request) -> None:
        """Let a request that has no blocks be computed with the weights that there are now."""
        if request.revision != self.revision:
            request.revision = self.revision
            own = request.spec.cache_root
            request.root_hash = root_hash(self._block_hash_key, model=self.revision, cache_root=own)
            self._kv.hash_known(request)

    def _needs_all_tokens(self, work: SamplingParams | PoolingParams) -> bool:
        if isinstance(work, SamplingParams) or self.bounds.pooling is None:
            return False
        return self.bounds.pooling.needs_all_tokens or work.is_of_tokens

    def _matcher(self, request: EngineRequest) -> Matcher | None:
        """Returns where the request stands in its grammar, if it has one."""
        if isinstance(request.work, PoolingParams) or request.work.structured_outputs is None:
            return None
        if self._grammars is None:
            raise UnsupportedError("structured_outputs: this engine has no grammars", param="structured_outputs")
        matcher = self._grammars.matcher(request.work.structured_outputs, request.asked(ReasoningSpan))
        try:
            for token in request.output_token_ids:
                matcher.accept(token)
        except GrammarFailure as error:
            raise InvalidRequestError(f"structured_outputs: {error}", param="structured_outputs") from error
        return matcher
