"""From a request's StructuredOutputs to its Matcher: limits, sandboxed compile, compilation, and what is remembered of
them."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer
from pydantic_core import PydanticSerializationError

from app.errors import InvalidRequestError, OverloadedError
from app.structured.grammar import compile_grammar
from app.structured.limits import GrammarLimits, check_size
from app.structured.matcher import Matcher
from app.structured.reasoning import ReasoningSpan
from app.structured.sandboxed_compile import SandboxedCompile
from app.structured.structured_outputs import StructuredOutputs
from app.structured.vocabulary import VocabularySource

MAX_WAIT_S = 10.0  # for the grammars of others that are being compiled
MAX_REFUSALS = 1024  # remembered, so that a grammar that is sent again costs no second compile
MAX_CACHED_BYTES = 1 << 20  # the cached grammars' texts; compiled they take 10 to 150 times as much


class GrammarCompiler:
    """Thread-safe. A grammar that is not in the cache blocks its caller (never the step loop, which only gets
    matchers) for about the time of compiling it twice: in the sandbox process, then here."""

    def __init__(self, source: VocabularySource, limits: GrammarLimits, cache_size: int) -> None:
        self._source = source
        self._limits = limits
        self._cache_size = cache_size
        self._sandbox = SandboxedCompile(source, limits)
        self._cache: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()  # with the size of its text
        self._num_cached_bytes = 0
        self._refusals: OrderedDict[bytes, InvalidRequestError] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def matcher(self, spec: StructuredOutputs, reasoning: ReasoningSpan | None = None) -> Matcher:
        """A matcher for one request.

        Raises InvalidRequestError naming the field, OverloadedError when no sandbox is free.
        """
        check_size(spec, self._limits)
        text = _text(spec)
        key = hashlib.blake2b(text, digest_size=16).digest()
        grammar = self._cached(key)
        if grammar is None:
            if not self._compile_lock.acquire(timeout=MAX_WAIT_S):
                raise OverloadedError("structured_outputs: too many grammars wait to be compiled; try later")
            try:
                grammar = self._cached(key) or self._compile(key, spec, len(text))
            finally:
                self._compile_lock.release()
        assert self._vocabulary is not None
        return Matcher(grammar, self._vocabulary, reasoning)

    def knows(self, spec: StructuredOutputs) -> bool:
        """True if `matcher` would answer at once, be it with a refusal."""
        try:
            check_size(spec, self._limits)
            key = hashlib.blake2b(_text(spec), digest_size=16).digest()
        except InvalidRequestError:
            return True
        with self._cache_lock:
            return key in self._cache or key in self._refusals

    def warm(self) -> None:
        """Start the sandbox process, without waiting for it."""
        self._sandbox.warm()

    def close(self) -> None:
        """End the sandbox process; idempotent."""
        self._sandbox.close()

    def _cached(self, key: bytes) -> LLMatcher | None:
        """A copy of its own, at the grammar's start. Raises what the grammar was refused with."""
        with self._cache_lock:
            if key in self._refusals:
                self._refusals.move_to_end(key)
                refusal = self._refusals[key]
                raise type(refusal)(refusal.message, param=refusal.param)
            found = self._cache.get(key)
            if found is None:
                return None
            self._cache.move_to_end(key)
            return found[0].deep_copy()

    def _compile(self, key: bytes, spec: StructuredOutputs, num_bytes: int) -> LLMatcher:
        try:
            self._sandbox.check(spec)
        except InvalidRequestError as error:
            self._remember_refusal(key, error)
            raise
        if self._vocabulary is None:
            self._vocabulary = self._source.load()
        grammar = compile_grammar(spec, self._vocabulary)
        with self._cache_lock:
            self._cache[key] = grammar, num_bytes
            self._num_cached_bytes += num_bytes
            while len(self._cache) > self._cache_size or (
                self._num_cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1
            ):
                self._num_cached_bytes -= self._cache.popitem(last=False)[1][1]
            return grammar.deep_copy()

    def _remember_refusal(self, key: bytes, error: InvalidRequestError) -> None:
        # A copy: on its way the error itself collects the frames that it passes, with the request and its grammar.
        with self._cache_lock:
            self._refusals[key] = type(error)(error.message, param=error.param)
            while len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)


def _text(spec: StructuredOutputs) -> bytes:
    try:
        return spec.model_dump_json().encode()
    except PydanticSerializationError as error:
        field = f"structured_outputs.{spec.kind}"
        what = f"{field}: holds an unpaired surrogate, which is no Unicode text"
        raise InvalidRequestError(what, param=field) from error
