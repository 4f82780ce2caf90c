"""Finds where messages begin in a rendered conversation, by the special tokens with which its template opens them.

A prompt's prefix up to such a place is what other prompts are likely to share: the system prompt and the tools, or the
conversation before its last message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from app.errors import InvalidRequestError
from app.records.message_borders import MessageBorders
from app.text.chat_template import ChatTemplate, RenderLimits
from app.text.tokenizer import Tokenizer

SHORTEST = 256  # tokens of a prompt worth looking at
MOST_MARKS = 4096  # a prompt may consist of nothing else
NUM_FIRST, NUM_LAST = 2, 2  # of the borders that are passed on
_ASKED = "Where is it?"


def message_marks(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens with which the template opens a user's message and an answer, as a short conversation shows;
    empty where it has none, or refuses so short a one."""
    if template.is_confined or not template.source_for(has_tools=False):
        return frozenset()
    turn, limits = [{"role": "user", "content": _ASKED}], RenderLimits(max_s=1.0)
    try:
        closed, opened = (template.render(turn, add_generation_prompt=opens, limits=limits) for opens in (False, True))
    except InvalidRequestError:
        return frozenset()
    special = tokenizer.special_token_ids
    before = [token for token in _tokens(tokenizer, closed.partition(_ASKED)[0]) if token in special]
    behind = _tokens(tokenizer, opened.removeprefix(closed)) if opened.startswith(closed) else []
    return frozenset([*before[-1:], *[token for token in behind[:1] if token in special]])


def message_borders(token_ids: Sequence[int], marks: frozenset[int]) -> MessageBorders | None:
    """Counts the tokens up to ends of messages that others are likely to share: the first ones of a prompt, and those
    before the last; None: nothing is known of them."""
    if not marks or len(token_ids) < SHORTEST:
        return None
    found = sorted(place for mark in marks for place in islice(_places(token_ids, mark), MOST_MARKS))
    # A mark with nothing but other special tokens before it opens the first message.
    borders = [place for place in found if place > 1]
    chosen = sorted({*borders[:NUM_FIRST], *borders[-NUM_LAST:]})
    return MessageBorders(tuple(chosen)) if chosen else None


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False) if text else []


def _places(token_ids: Sequence[int], mark: int) -> Iterator[int]:
    place = -1
    while True:
        try:
            place = token_ids.index(mark, place + 1)
        except ValueError:
            return
        yield place
