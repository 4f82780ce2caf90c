"""A grammar, compiled.

The library is llguidance: a Rust package that needs neither torch nor numpy (I8) and compiles lazily, so that a
grammar is ready in about a millisecond whatever the vocabulary, and whose regular expressions are derivatives, which
no pattern makes exponential. `docs/structured_output.md` has the figures.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from app.errors import InvalidRequestError
from app.structured.grammar_text import grammar_text
from app.structured.limits import parser_limits
from app.structured.structured_outputs import StructuredOutputs
from app.structured.vocabulary import num_mask_words

MAX_REASON = 400  # characters of the library's own words that a client gets to see


def compile_grammar(spec: StructuredOutputs, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at the grammar's start, its first mask computed; InvalidRequestError says what is wrong with it."""
    field = f"structured_outputs.{spec.kind}"
    matcher = LLMatcher(vocabulary, grammar_text(spec, vocabulary), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise InvalidRequestError(f"{field}: {_reason(matcher)}", param=field)
    mask = np.zeros(num_mask_words(vocabulary), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if not mask.any() or (matcher.is_error() and "NoExtension" in matcher.get_error()):
        raise InvalidRequestError(f"{field}: nothing matches it", param=field)
    if matcher.is_error():
        raise InvalidRequestError(f"{field}: {_reason(matcher)}", param=field)
    return matcher


def _reason(matcher: LLMatcher) -> str:
    text = str(matcher.get_error()).partition("<state>")[0].strip()
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."
