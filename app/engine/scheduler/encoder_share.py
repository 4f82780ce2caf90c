"""Bounds what the encoder does in a step: a chunk of a prompt ends before a picture that would make the step too long.

The workers encode an item before the first chunk that touches it, and keep what came of it for as long as their cache
has room. What a decoder attends to as a whole is an item that every chunk touches. The same book is kept here, so that
an item is counted once for all requests that show it; where it should differ from the workers', a step takes longer,
and nothing else. A step that encodes nothing else takes any one item.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class EncoderShare:
    """The encoder's share of the step that is being planned, in tokens that stand for pieces of items."""

    def __init__(self, tokens_each: int, cache_tokens: int, whole: bool = False) -> None:
        """`tokens_each`: of a step; `cache_tokens`: that the workers keep; `whole`: a chunk ends within no item."""
        self._each, self._whole = tokens_each, whole
        self._left = tokens_each
        self._is_untouched = True  # this step encodes nothing so far
        self._known: SizedCache[bool] = SizedCache(cache_tokens)
        self._planned: set[bytes] = set()  # that this step encodes

    def begin_plan(self) -> None:
        """A new step."""
        self._left, self._is_untouched = self._each, True
        self._planned.clear()

    def may_begin(self, request: Request, begin: int) -> bool:
        """True if a chunk that begins behind `begin` tokens has at least one token in this step."""
        return all(self._fits(item) for item in _touched(request, begin, begin + 1))

    def least_end(self, request: Request, begin: int) -> int:
        """Finds where a chunk that begins behind `begin` tokens may end at the earliest."""
        ends = (item.end for item in _touched(request, begin, begin + 1) if self._whole)
        return max(ends, default=begin + 1)

    def cut(self, request: Request, begin: int, end: int) -> int:
        """Takes what a chunk from `begin` to `end` shows out of the step's share; the chunk's end, which is before the
        first item that has to wait."""
        for item in _touched(request, begin, end):
            is_cut = self._whole and end < item.end
            if is_cut or not self._fits(item):
                return max(begin, item.offset)
            self._take(item)
        return end

    def forget(self) -> None:
        """The workers have forgotten what they kept."""
        self._known.clear()

    def _fits(self, item: Touched) -> bool:
        is_free = item.digest in self._planned or self._known.find(item.digest) is not None
        return is_free or self._is_untouched or item.length <= self._left

    def _take(self, item: Touched) -> None:
        if item.digest in self._planned or self._known.find(item.digest) is not None:
            return
        self._is_untouched = False
        self._left = max(0, self._left - item.length)
        self._planned.add(item.digest)
        self._known.keep(item.digest, True, item.length)


def _touched(request: Request, begin: int, end: int) -> Iterator[Touched]:
    asks = request.spec.asks
    if (read := encoder_input_of(asks)) is not None:
        yield Touched(read.digest, read.length, begin, end)
    if (ask := media_of(asks)) is not None:
        for item in ask.items:
            if item.offset < end and item.end > begin:
                yield Touched(item.digest, item.length, item.offset, item.end)
