"""Names of tokens inside grammars: which text stands for a token of the model, and how a grammar says so.

A special token is no text (its bytes are not matched by any), so a model whose format begins a call with one could
never write what a grammar asks for in letters. A token that was merely added to the vocabulary is text like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

from llguidance import LLTokenizer

# What a grammar in the Lark notation consists of, as far as `<name>` must be told from what only looks like it.
_LARK = re.compile(
    r"""(?P<other>"(?:\\.|[^"\\\n])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/|<\[[-\d,^\s]*\]>)|(?P<name><[^<>\s"\[\]]+>)"""
)


@lru_cache(maxsize=2)
def special_tokens(vocabulary: LLTokenizer) -> Mapping[str, int]:
    """Id of each special token by its text; without those that end an answer, which no part of one can be."""
    ids = (i for i in range(vocabulary.vocab_size) if vocabulary.is_special_token(i))
    named = {vocabulary.decode_bytes([i]).decode("utf-8", "replace"): i for i in ids if i not in vocabulary.eos_tokens}
    return {name: i for name, i in named.items() if name}


def split_markers(text: str, markers: Mapping[str, int]) -> list[str]:
    """The text, cut before and after each marker; without empty pieces. The longest marker wins."""
    if not markers:
        return [text] if text else []
    names = sorted(markers, key=len, reverse=True)
    return [piece for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", text) if piece]


def literal(text: str, markers: Mapping[str, int]) -> str:
    """A Lark expression for exactly this text, markers as their tokens; '""' for no text."""
    pieces = split_markers(text, markers)
    return " ".join(f"<[{markers[piece]}]>" if piece in markers else quoted(piece) for piece in pieces) or '""'


def quoted(text: str) -> str:
    """A Lark expression for this text in letters."""
    return json.dumps(text, ensure_ascii=False)


def with_token_ids(lark: str, vocabulary: LLTokenizer) -> str:
    """A user's grammar with the ids of the tokens that it names; the library knows the names of special ones only."""

    def by_id(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found.group()
        ids = vocabulary.tokenize_str(found["name"])
        return f"<[{ids[0]}]>" if len(ids) == 1 else found.group()

    return _LARK.sub(by_id, lark)
