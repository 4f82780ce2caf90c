"""Cuts a file of Opus in Ogg (RFC 3533, RFC 7845) into stretches that decode side by side.

A decoder that begins in the midst of a stream sounds right after 80 ms, so a stretch has pages before it whose samples
are thrown away, and one behind it, so that resampling hears what follows. Its place is counted from its end: a page
says how many samples there are once its packets are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

HEAD = b"OpusHead"
RATE = 48_000  # that pages count in
STRETCH_S = 120.0
_PAGE = Struct("<4sBBqIIIB")  # capture, version, kind, samples so far, stream, number, checksum, lengths that follow
_CONTINUED, _FIRST = 1, 2
_BEFORE_S = 1.0  # thrown away
_MOST_PAGES = 1 << 14  # two hours have 7,200 of the usual length; a file of more is one stretch


@dataclass(slots=True, frozen=True)
class Stretch:
    """A file of its own, and what to keep of its samples (48 kHz): `behind` at its end are not, nor what stands before
    `kept`; None: all that does."""

    data: bytes
    kept: int | None
    behind: int


@dataclass(slots=True, frozen=True)
class _Page:
    begin: int
    end: int
    samples: int  # once its packets are decoded; -1: none ends in it
    begins_packet: bool


def is_opus(data: bytes) -> bool:
    """True if an Ogg file's first page begins a stream of Opus."""
    return data.startswith(b"OggS") and data[28:36] == HEAD


def stretches(data: bytes) -> list[Stretch]:
    """The file in stretches of about `STRETCH_S`; itself where it is short, or not one plain stream."""
    pages = _pages(data)
    places = [page.samples for page in pages[2:]]
    is_plain = len(pages) > 3 and all(page.begins_packet for page in pages[:3]) and min(places) >= 0
    if not is_plain or any(after < before for before, after in pairwise(places)):
        return [Stretch(data, None, 0)]
    cuts = [2]  # pages that begin a stretch: those before are two of headers
    for index in range(3, len(pages) - 1):
        length = pages[index - 1].samples - pages[cuts[-1] - 1].samples if cuts[-1] > 2 else pages[index - 1].samples
        if length >= STRETCH_S * RATE and pages[index].begins_packet:
            cuts.append(index)
    head = data[: pages[1].end]
    return [_stretch(data, head, pages, begin, end) for begin, end in zip(cuts, [*cuts[1:], len(pages)], strict=True)]


def _stretch(data: bytes, head: bytes, pages: Sequence[_Page], begin: int, end: int) -> Stretch:
    """Pages of a file from `begin` to before `end`, with those around them."""
    first, last, start = begin, min(end, len(pages) - 1), pages[begin - 1].samples
    while first > 2 and (start - pages[first].samples < _BEFORE_S * RATE or not pages[first].begins_packet):
        first -= 1
    behind = pages[last].samples - pages[end - 1].samples
    body = data[pages[first].begin : pages[last].end]
    return Stretch(head + body, None if begin == 2 else pages[end - 1].samples - start, behind)


def _pages(data: bytes) -> list[_Page]:
    """All pages; none where something else lies between them, they are too many, or of more than one stream."""
    found: list[_Page] = []
    streams: set[int] = set()
    place = 0
    while place + _PAGE.size <= len(data):
        capture, _, kind, samples, stream, _, _, count = _PAGE.unpack_from(data, place)
        streams.add(stream)
        if capture != b"OggS" or len(streams) > 1 or (found and kind & _FIRST) or len(found) == _MOST_PAGES:
            return []
        lengths = data[place + _PAGE.size : place + _PAGE.size + count]
        end = place + _PAGE.size + count + sum(lengths)
        if end > len(data):
            break  # cut off in it
        found.append(_Page(place, end, samples, not kind & _CONTINUED))
        place = end
    return found
