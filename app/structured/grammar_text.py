"""StructuredOutputs -> the grammar text that llguidance compiles.

Nothing is compiled here; what can be told from the request alone is refused with the field's name.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from app.errors import InvalidRequestError
from app.structured.json_style import json_options
from app.structured.markers import special_tokens, with_token_ids
from app.structured.patterns import ascii_classes, with_ascii_patterns
from app.structured.structural_tag import structural_tag_grammar
from app.structured.structured_outputs import StructuredOutputs


def grammar_text(spec: StructuredOutputs, vocabulary: LLTokenizer) -> str:
    """The grammar of `spec` in llguidance's own notation; InvalidRequestError names the field at fault.

    The vocabulary only says which names stand for tokens.
    """
    kind = spec.kind
    if kind == "json":
        return _json(spec.json_schema, spec)
    if kind == "json_object":
        return _json({"type": "object"}, spec)
    if kind == "regex":
        assert spec.regex is not None
        return str(LLMatcher.grammar_from_regex(ascii_classes(spec.regex)))
    if kind == "choice":
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice or ())
        return str(LLMatcher.grammar_from_lark(f"start: {options}"))
    if kind == "grammar":
        return _lark(spec.grammar or "", vocabulary)
    assert spec.structural_tag is not None
    return structural_tag_grammar(spec.structural_tag, special_tokens(vocabulary))


def _json(schema: Any, spec: StructuredOutputs) -> str:
    options = json_options(spec.disable_any_whitespace, spec.whitespace_pattern)
    if schema is True:
        schema = {}
    if schema is False:
        raise InvalidRequestError("structured_outputs.json: nothing matches it", param="structured_outputs.json")
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(with_ascii_patterns(schema)), overrides=options))
    except ValueError as error:
        raise InvalidRequestError(f"structured_outputs.json: {error}", param="structured_outputs.json") from error


def _lark(text: str, vocabulary: LLTokenizer) -> str:
    """Lark as it is, but for names of tokens; GBNF (`name ::= ...`) translated."""
    if text.lstrip().startswith("%llguidance"):  # Lark for certain, whatever its strings hold
        return str(LLMatcher.grammar_from_lark(with_token_ids(text, vocabulary)))
    try:
        return str(LLMatcher.grammar_from_lark(with_token_ids(any_to_lark(text), vocabulary)))
    except Exception as error:  # the translator raises whatever its reading of the text runs into
        raise InvalidRequestError(
            f"structured_outputs.grammar: cannot be read: {error}", param="structured_outputs.grammar"
        ) from error
