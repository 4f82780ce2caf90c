"""From a request's StructuredOutputs to its Matcher: limits, trial, compilation, and the cache of grammars."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer
from pydantic_core import PydanticSerializationError

from app.engine.structured.grammar import compile_grammar
from app.engine.structured.limits import GrammarLimits, check_size
from app.engine.structured.matcher import Matcher
from app.engine.structured.reasoning import ReasoningSpan
from app.engine.structured.structured_outputs import StructuredOutputs
from app.engine.structured.trial import GrammarTrial
from app.engine.structured.vocabulary import VocabularySource
from app.errors import InvalidRequestError, OverloadedError

MAX_WAIT_S = 10.0  # for the grammars of others that are being compiled


class GrammarCompiler:
    """Thread-safe. A grammar that is not in the cache blocks its caller (never the step loop, which only gets
    matchers) for about the time of compiling it twice: in the trial's process, then here."""

    def __init__(self, source: VocabularySource, limits: GrammarLimits, cache_size: int) -> None:
        self._source = source
        self._limits = limits
        self._cache_size = cache_size
        self._trial = GrammarTrial(source, limits)
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def matcher(self, spec: StructuredOutputs, reasoning: ReasoningSpan | None = None) -> Matcher:
        """A matcher for one request.

        Raises InvalidRequestError naming the field, OverloadedError when no trial can be had.
        """
        check_size(spec, self._limits)
        key = _key(spec)
        grammar = self._cached(key)
        if grammar is None:
            if not self._compile_lock.acquire(timeout=MAX_WAIT_S):
                raise OverloadedError("structured_outputs: too many grammars wait to be compiled; try later")
            try:
                grammar = self._cached(key) or self._compile(key, spec)
            finally:
                self._compile_lock.release()
        assert self._vocabulary is not None
        return Matcher(grammar, self._vocabulary, reasoning)

    def warm(self) -> None:
        """Start the trial's process, without waiting for it."""
        self._trial.warm()

    def close(self) -> None:
        """End the trial's process; idempotent."""
        self._trial.close()

    def _cached(self, key: str) -> LLMatcher | None:
        """A copy of its own, at the grammar's start."""
        with self._cache_lock:
            grammar = self._cache.get(key)
            if grammar is None:
                return None
            self._cache.move_to_end(key)
            return grammar.deep_copy()

    def _compile(self, key: str, spec: StructuredOutputs) -> LLMatcher:
        self._trial.check(spec)
        if self._vocabulary is None:
            self._vocabulary = self._source.load()
        grammar = compile_grammar(spec, self._vocabulary)
        with self._cache_lock:
            self._cache[key] = grammar
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
            return grammar.deep_copy()


def _key(spec: StructuredOutputs) -> str:
    try:
        return spec.model_dump_json()
    except PydanticSerializationError as error:
        field = f"structured_outputs.{spec.kind}"
        what = f"{field}: holds an unpaired surrogate, which is no Unicode text"
        raise InvalidRequestError(what, param=field) from error
