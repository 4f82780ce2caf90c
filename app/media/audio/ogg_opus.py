"""Cuts a file of Opus in Ogg (RFC 3533, RFC 7845) into stretches that decode side by side.

A decoder that begins in the midst of a stream sounds right after 80 ms, so a stretch has pages before it whose samples
are thrown away, and one behind it, so that resampling hears what follows. Its place is counted from its end: a page
says how many samples there are once its packets are decoded. A decoder fills no gaps, so a file is cut only where its
pages say what its packets have: a recorder that leaves silence out counts on over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

import numpy as np

HEAD = b"OpusHead"
RATE = 48_000  # that pages count in
STRETCH_S = 120.0
_PAGE = Struct("<4sBBqIIIB")  # capture, version, kind, samples so far, stream, number, checksum, lengths that follow
_CONTINUED, _FIRST, _LAST = 1, 2, 4
_BEFORE_S = 1.0  # thrown away
_MOST_PAGES = 1 << 14  # two hours have 7,200 of the usual length; a file of more is one stretch
_MOST_PARTS = 1 << 20  # of packets, in all pages; two hours have 720,000
# Samples of a frame, by the upper five bits of its packet's first byte (RFC 6716, 3.1).
_FRAME = np.array([480, 960, 1_920, 2_880] * 3 + [480, 960] * 2 + [120, 240, 480, 960] * 4)


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
    lengths: bytes  # of the parts of its packets, which lie at its end
    kind: int

    @property
    def begins_packet(self) -> bool:
        return not self.kind & _CONTINUED

    @property
    def leaves_packet(self) -> bool:
        return self.lengths.endswith(b"\xff")


def is_opus(data: bytes) -> bool:
    """True if an Ogg file's first page begins a stream of Opus."""
    return data.startswith(b"OggS") and data[28:36] == HEAD


def seconds(data: bytes) -> float | None:
    """A file's length, by its pages and its packets; None where it is not one plain stream."""
    pages = _pages(data)
    return _seconds(data, pages) if _is_plain(data, pages) else None


def stretches(data: bytes, most_s: float = math.inf) -> list[Stretch]:
    """The file in stretches of about `STRETCH_S`; itself where it is short, not one plain stream, or longer than
    `most_s`: who decodes it says so."""
    pages = _pages(data)
    if not _is_plain(data, pages) or _seconds(data, pages) > most_s:
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


def _seconds(data: bytes, pages: Sequence[_Page]) -> float:
    before = int.from_bytes(data[38:40], "little")  # samples at its beginning that are not heard
    return (pages[-1].samples - before) / RATE


def _is_plain(data: bytes, pages: Sequence[_Page]) -> bool:
    """True if the pages behind two of headers say how many samples there are, and their packets have as many."""
    if len(pages) < 4 or min(page.samples for page in pages) < 0 or not _is_in_order(pages):
        return False
    sounding = pages[2:]
    said: list[int] = np.diff([0, *(page.samples for page in sounding)]).tolist()
    own = _samples_of_packets(data, sounding)
    is_end_right = 0 <= said[-1] <= own[-1] if pages[-1].kind & _LAST else said[-1] == own[-1]  # the rest is cut off
    return said[0] >= own[0] and said[1:-1] == own[1:-1] and is_end_right  # a live stream may begin late


def _is_in_order(pages: Sequence[_Page]) -> bool:
    """True if the headers fill two pages, and each page goes on with a packet where the one before it left one."""
    has_headers = all(sum(length < 255 for length in page.lengths) == 1 for page in pages[:2])
    is_joined = all(before.leaves_packet != after.begins_packet for before, after in pairwise(pages))
    num_parts = sum(len(page.lengths) for page in pages)
    return has_headers and is_joined and pages[2].begins_packet and pages[1].begins_packet and num_parts <= _MOST_PARTS


def _samples_of_packets(data: bytes, pages: Sequence[_Page]) -> list[int]:
    """Counts, for each page, the samples of the packets that end in it. The first page begins one."""
    lengths = np.frombuffer(b"".join(page.lengths for page in pages), np.uint8).astype(np.int64)
    page_of = np.repeat(np.arange(len(pages)), [len(page.lengths) for page in pages])
    bodies = np.array([sum(page.lengths) for page in pages])
    shifts = np.array([page.end for page in pages]) - np.cumsum(bodies)  # of a body against all bodies in a row
    places = np.cumsum(lengths) - lengths + shifts[page_of]
    is_end = lengths < 255
    ends = np.flatnonzero(is_end)
    begins = np.flatnonzero(np.r_[True, is_end[:-1]])[: len(ends)]
    file = np.frombuffer(data, np.uint8)
    first, second = (file[np.minimum(places[begins] + at, len(file) - 1)] for at in (0, 1))
    num_frames = np.where(first & 3 == 3, second & 63, np.minimum(first & 3, 1) + 1)  # RFC 6716, 3.2
    samples = np.where(lengths[begins] > 0, num_frames * _FRAME[first >> 3], 0)
    found: list[int] = np.bincount(page_of[ends], samples, len(pages)).astype(int).tolist()
    return found


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
        found.append(_Page(place, end, samples, lengths, kind))
        place = end
    return found
