"""The encoder's share of a step: chunks end before what has to wait, and one item always gets in."""

from __future__ import annotations

from dataclasses import replace

from app.engine.scheduler.encoder_share import EncoderShare
from app.records.encoder_input import EncoderInput
from app.records.media import MediaAsk, MediaItem
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams

ITEM = MediaItem("image", b"a" * 16, offset=4, length=10, grid=(1, 2, 5), shape=(), pixels=b"")
OTHER = replace(ITEM, digest=b"b" * 16, offset=20)


def request(*items: MediaItem) -> Request:
    spec = EngineRequest("r", [], SamplingParams(), asks=(MediaAsk(items),) if items else ())
    return Request(spec, [0] * 40, 40, 41, (), frozenset(), b"")


def test_a_chunk_ends_before_what_has_to_wait() -> None:
    share = EncoderShare(15, 100)
    share.begin_plan()
    assert share.cut(request(), 0, 40) == 40
    first = request(ITEM, OTHER)
    assert share.cut(first, 0, 4) == 4  # touches nothing
    assert share.cut(first, 0, 40) == 20  # the second would be 20 tokens in all
    assert not share.may_begin(first, 20)
    assert share.cut(first, 20, 40) == 20
    again = request(replace(ITEM, offset=0))
    assert share.may_begin(again, 0)  # encoded in this step
    assert share.cut(again, 0, 30) == 30
    share.begin_plan()
    assert share.cut(first, 8, 40) == 40  # the first is known


def test_what_is_left_of_an_item_is_one_chunk() -> None:
    share = EncoderShare(15, 100, whole=True)
    share.begin_plan()
    both = request(ITEM, OTHER)
    assert share.cut(both, 0, 9) == 4
    assert [share.least_end(both, begin) for begin in (0, 4, 9, 14)] == [1, 14, 14, 15]
    assert share.cut(both, 4, 14) == 14
    assert share.cut(both, 4, 13) == 4
    assert EncoderShare(15, 100).least_end(both, 4) == 5


def test_a_step_takes_one_item_whatever_its_size() -> None:
    share = EncoderShare(8, 100)
    share.begin_plan()
    assert share.cut(request(ITEM), 4, 6) == 6
    assert share.cut(request(OTHER), 18, 30) == 20
    share.begin_plan()
    assert share.cut(request(OTHER), 20, 30) == 30
    share.forget()
    share.begin_plan()
    assert share.cut(request(ITEM, OTHER), 0, 30) == 20


def test_every_chunk_touches_what_a_decoder_attends_to() -> None:
    read = EncoderInput("audio", b"c" * 16, 10, (2, 20), b"")
    spec = EngineRequest("r", [], SamplingParams(), asks=(read,))
    first = Request(spec, [0] * 40, 40, 41, (), frozenset(), b"")
    other = Request(replace(spec, asks=(replace(read, digest=b"d" * 16),)), [0] * 40, 40, 41, (), frozenset(), b"")
    share = EncoderShare(15, 20)
    share.begin_plan()
    assert share.cut(first, 0, 5) == 5
    assert not share.may_begin(other, 0)
    assert share.cut(other, 0, 40) == 0
    share.begin_plan()
    assert share.cut(first, 5, 40) == 40  # is known
    assert share.cut(other, 0, 40) == 40
