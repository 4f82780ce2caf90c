"""The encoder's share of a step: chunks end before what has to wait, and one item always gets in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.engine.scheduler.encoder_share import EncoderRules, EncoderShare, create_share
from app.records.encoder_input import EncoderInput
from app.records.media import MediaAsk, MediaItem
from app.records.media_info import MediaInfo
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import Results, make_core, make_request
from tests.engine.fake_executor import FakeExecutor

ITEM = MediaItem("image", b"a" * 16, offset=4, length=10, grid=(1, 2, 5), shape=(), pixels=b"")
OTHER = replace(ITEM, digest=b"b" * 16, offset=20)


def request(*items: MediaItem, name: str = "r") -> Request:
    spec = EngineRequest(name, [], SamplingParams(), asks=(MediaAsk(items),) if items else ())
    return Request(spec, [0] * 40, 40, 41, (), frozenset(), b"")


def test_a_chunk_ends_before_what_has_to_wait() -> None:
    share = EncoderShare(EncoderRules(15, 100))
    share.begin_plan()
    assert share.cut(request(), 0, 40) == 40
    first = request(ITEM, OTHER)
    assert share.cut(first, 0, 4) == 4  # touches nothing
    assert share.cut(first, 0, 40) == 20  # the second would be 20 tokens in all
    assert not share.begins(first, 20)
    assert share.cut(first, 20, 40) == 20
    again = request(replace(ITEM, offset=0))
    assert share.begins(again, 0)  # encoded in this step
    assert share.cut(again, 0, 30) == 30
    share.begin_plan()
    assert share.cut(first, 8, 40) == 40  # the first is known


def test_what_is_left_of_an_item_is_one_chunk() -> None:
    share = EncoderShare(EncoderRules(15, 100, whole=True))
    share.begin_plan()
    both = request(ITEM, OTHER)
    assert share.cut(both, 0, 9) == 4
    assert [share.least_end(both, begin) for begin in (0, 4, 9, 14)] == [1, 14, 14, 15]
    assert share.cut(both, 4, 14) == 14
    assert share.cut(both, 4, 13) == 4
    assert EncoderShare(EncoderRules(15, 100)).least_end(both, 4) == 5


def test_a_step_takes_one_item_whatever_its_size() -> None:
    share = EncoderShare(EncoderRules(8, 100))
    share.begin_plan()
    assert share.cut(request(ITEM), 4, 6) == 6
    assert share.cut(request(OTHER), 18, 30) == 20
    share.begin_plan()
    assert share.cut(request(OTHER), 20, 30) == 30
    share.forget()
    share.begin_plan()
    assert share.cut(request(ITEM, OTHER), 0, 30) == 20


def test_a_look_is_no_use() -> None:
    """The workers' cache forgets what was shown longest ago, not what somebody asked about."""
    share = EncoderShare(EncoderRules(15, 20))
    third = replace(ITEM, digest=b"c" * 16)
    for item in (ITEM, OTHER):
        share.begin_plan()
        share.cut(request(item), item.offset, item.end)
    share.begin_plan()
    assert share.begins(request(ITEM), 4)
    share.cut(request(third), 4, 14)  # takes the place of the first, which nobody has shown again
    share.begin_plan()
    assert [item.digest in share._known for item in (ITEM, OTHER, third)] == [False, True, True]


def test_what_left_the_step_was_not_encoded() -> None:
    share, gone = EncoderShare(EncoderRules(15, 100)), request(ITEM, name="gone")
    share.begin_plan()
    share.cut(gone, 4, 14)
    share.drop(gone)
    share.begin_plan()
    assert ITEM.digest not in share._known
    assert not share._shown


def test_nobody_who_comes_later_takes_the_share_that_one_waits_for() -> None:
    small = request(replace(ITEM, digest=b"s" * 16, offset=0, length=2))
    share = EncoderShare(EncoderRules(15, 100))
    share.begin_plan()
    share.cut(request(ITEM), 4, 14)
    assert share.begins(small, 0)
    assert not share.begins(request(OTHER), 20)
    assert not share.begins(small, 0)
    assert share.begins(request(ITEM, name="again"), 4)  # which takes nothing
    assert share.begins(request(), 0)
    share.begin_plan()
    assert share.begins(request(OTHER), 20)


def test_a_model_that_sees_nothing_has_none() -> None:
    share = create_share(None)
    share.begin_plan()
    assert share.begins(request(), 0)
    assert (share.cut(request(), 3, 9), share.least_end(request(), 3)) == (9, 4)


WHOLE = 16  # tokens of a picture that is computed in one step


def test_a_picture_that_cannot_be_cut_waits_for_those_before_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that come later took the tokens that it needs, step by step, for as long as such came."""
    monkeypatch.setattr(MediaInfo, "of", classmethod(lambda cls, info: MediaInfo("gemma3", 300, whole_tokens=WHOLE)))
    monkeypatch.setattr(FakeExecutor, "start", lambda self: replace(self.info, encoder_tokens=100))
    core = make_core(num_blocks=4000, max_num_batched_tokens=24, max_num_seqs=4, max_inflight_steps=1)
    core.add_request(make_request("t0", list(range(34)), max_tokens=1))
    core.step()
    item = replace(ITEM, offset=0, length=WHOLE, shape=(0,))
    shows = replace(make_request("picture", [9] * 20, max_tokens=1), asks=(MediaAsk((item,)),))
    core.add_request(shows)
    results, count = Results(), 0
    while "picture" not in results.final:
        while sum(name.startswith("t") for name in core.scheduler.requests) < 3:
            count += 1
            assert count < 20, "texts have overtaken it"
            core.add_request(make_request(f"t{count}", [count] * 48, max_tokens=1))
        results.take(core.step())
    assert results.order[:2] == ["t0", "picture"]


def test_every_chunk_touches_what_a_decoder_attends_to() -> None:
    read = EncoderInput("audio", b"c" * 16, 10, (2, 20), b"")
    spec = EngineRequest("first", [], SamplingParams(), asks=(read,))
    first = Request(spec, [0] * 40, 40, 41, (), frozenset(), b"")
    read = replace(read, digest=b"d" * 16)
    other = Request(replace(spec, request_id="other", asks=(read,)), [0] * 40, 40, 41, (), frozenset(), b"")
    share = EncoderShare(EncoderRules(15, 20))
    share.begin_plan()
    assert share.cut(first, 0, 5) == 5
    assert not share.begins(other, 0)
    assert share.cut(other, 0, 40) == 0
    share.begin_plan()
    assert share.cut(first, 5, 40) == 40  # is known
    assert share.cut(other, 0, 40) == 40
