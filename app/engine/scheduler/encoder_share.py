"""Bounds what the encoder does in a step: a chunk of a prompt ends before a picture that would make the step too long.

The workers encode an item before the first chunk that touches it, and keep what came of it for as long as their cache
has room. What a decoder attends to as a whole is an item that every chunk touches. The same book is kept here, so that
an item is counted once for all requests that show it; where it should differ from the workers', a step takes longer,
and nothing else. A step that encodes nothing else takes any one item.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from app.records.encoder_input import encoder_input_of
from app.records.media import media_of
from app.records.request_state import Request
from app.records.sized_cache import SizedCache


class Touched(NamedTuple):
    """An item that a chunk touches."""

    digest: bytes
    length: int  # tokens, or positions, that an encoder gives of it
    offset: int  # of its first token
    end: int  # behind its last one
    may_cut: bool = True  # the tokens of a sound, and positions that are attended to, never see each other


@dataclass(slots=True, frozen=True)
class EncoderRules:
    """Bounds of encoders, in tokens that stand for pieces of items."""

    step_tokens: int  # that a step encodes
    cache_tokens: int  # that the workers keep
    whole: bool = False  # what is left of an item is computed in one step


class EncoderShare:
    """The encoder's share of the step that is being planned."""

    def __init__(self, rules: EncoderRules) -> None:
        self._rules = rules
        self._left = rules.step_tokens
        self._is_untouched = True  # this step encodes nothing so far
        self._known: SizedCache[bool] = SizedCache(rules.cache_tokens)
        self._shown: dict[str, dict[bytes, int]] = {}  # by requests of this step: digests and tokens

    def begin_plan(self) -> None:
        """A new step; the workers look for all that one shows before they keep what they had to encode."""
        shown = [pair for items in self._shown.values() for pair in items.items()]
        missing = [(digest, length) for digest, length in shown if self._known.find(digest) is None]
        for digest, length in missing:
            self._known.keep(digest, True, length)
        self._left, self._is_untouched = self._rules.step_tokens, True
        self._shown.clear()

    def drop(self, request: Request) -> None:
        """A request has left the step."""
        self._shown.pop(request.request_id, None)

    def begins(self, request: Request, begin: int) -> bool:
        """True if a chunk that begins behind `begin` tokens has at least one token in this step; else nobody who comes
        later takes what is left of the share before it."""
        fits = all(self._fits(item) for item in _touched(request, begin, begin + 1))
        if not fits:
            self._left, self._is_untouched = 0, False
        return fits

    def least_end(self, request: Request, begin: int) -> int:
        """Finds where a chunk that begins behind `begin` tokens may end at the earliest."""
        if not self._rules.whole:
            return begin + 1
        touched = _touched(request, begin, begin + 1)
        return max((item.end for item in touched if not item.may_cut), default=begin + 1)

    def cut(self, request: Request, begin: int, end: int) -> int:
        """Takes what a chunk from `begin` to `end` shows out of the step's share; the chunk's end, which is before the
        first item that has to wait."""
        for item in _touched(request, begin, end):
            is_cut = self._rules.whole and not item.may_cut and end < item.end
            if is_cut or not self._fits(item):
                return max(begin, item.offset)
            self._take(request, item)
        return end

    def forget(self) -> None:
        """The workers have forgotten what they kept."""
        self._known.clear()
        self._shown.clear()

    def _fits(self, item: Touched) -> bool:
        return self._is_known(item) or self._is_untouched or item.length <= self._left

    def _is_known(self, item: Touched) -> bool:
        return item.digest in self._known or any(item.digest in items for items in self._shown.values())

    def _take(self, request: Request, item: Touched) -> None:
        if not self._is_known(item):
            self._is_untouched = False
            self._left = max(0, self._left - item.length)
        self._shown.setdefault(request.request_id, {})[item.digest] = item.length


class NoItems(EncoderShare):
    """The share of a model that sees nothing."""

    def __init__(self) -> None:
        super().__init__(EncoderRules(0, 0))

    def begin_plan(self) -> None:
        """See EncoderShare."""

    def begins(self, request: Request, begin: int) -> bool:
        """See EncoderShare."""
        return True

    def cut(self, request: Request, begin: int, end: int) -> int:
        """See EncoderShare."""
        return end


def create_share(rules: EncoderRules | None) -> EncoderShare:
    """The share; None: the model sees nothing."""
    return NoItems() if rules is None else EncoderShare(rules)


def _touched(request: Request, begin: int, end: int) -> Iterator[Touched]:
    asks = request.spec.asks
    if (read := encoder_input_of(asks)) is not None:
        yield Touched(read.digest, read.length, begin, end)
    if (ask := media_of(asks)) is not None:
        for item in ask.items:
            if item.offset < end and item.end > begin:
                yield Touched(item.digest, item.length, item.offset, item.end, item.kind == "audio")
