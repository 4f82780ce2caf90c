"""Stop strings against a search in the whole text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.stop_strings import StopStrings

letters = st.text(alphabet="ab\n", max_size=24)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stop: list[str], include: bool = False, free: int = 0) -> tuple[list[str], str | None]:
    """(shown pieces, stop string) of feeding `pieces`, the first `free` of which cannot complete a stop."""
    watcher = StopStrings(stop, include)
    shown = []
    for i, piece in enumerate(pieces):
        shown.append(watcher.feed(piece, countable=i >= free))
        if watcher.found is not None:
            return shown, watcher.found
    return [*shown, watcher.flush()], None


@settings(max_examples=400, deadline=None)
@given(text=letters, stop=stops, include=st.booleans())
def test_char_by_char_equals_a_search(text: str, stop: list[str], include: bool) -> None:
    # Reading character by character, the match that is complete first wins; among those the earliest begun.
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    shown, found = run(list(text), stop, include)
    if not ends:
        assert (found, "".join(shown)) == (None, text)
    else:
        end, start, expected = min(ends)
        assert found == expected
        assert "".join(shown) == text[: end if include else start]


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab\n", max_size=5), max_size=8), stop=stops, include=st.booleans())
def test_nothing_of_a_stop_string_is_ever_shown(pieces: list[str], stop: list[str], include: bool) -> None:
    shown, found = run(pieces, stop, include)
    text, out = "".join(pieces), "".join(shown)
    assert text.startswith(out)
    if found is None:
        assert out == text
        assert not any(s in text for s in stop)
    elif include:
        assert out.endswith(found)
        assert not any(s in out[: -len(found)] for s in stop)
    else:
        assert text.startswith(out + found)
        assert not any(s in out for s in stop)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=8), stop=stops, free=st.integers(0, 8))
def test_a_match_counts_only_when_completed_after_min_tokens(pieces: list[str], stop: list[str], free: int) -> None:
    shown, found = run(pieces, stop, free=free)
    text, num_free = "".join(pieces), len("".join(pieces[:free]))
    late = [i for i in range(len(text)) for s in stop if text.startswith(s, i) and i + len(s) > num_free]
    assert (found is not None) == bool(late)
    if not late:
        assert "".join(shown) == text


def test_only_what_may_become_a_stop_is_held() -> None:
    watcher = StopStrings(["STOP", "\n\nUser:"])
    assert watcher.feed("hello S") == "hello "
    assert watcher.feed("T") == ""
    assert watcher.feed("A") == "STA"
    assert watcher.feed("\n\nUse") == ""
    assert watcher.feed("ful\n") == "\n\nUseful"
    assert watcher.flush() == "\n"


def test_the_earliest_match_wins_over_the_order_of_the_list() -> None:
    assert run(["xxabcd"], ["cd", "ab"]) == (["xx"], "ab")


def test_included_stops_are_not_held_back() -> None:
    watcher = StopStrings(["STOP"], include_in_output=True)
    assert watcher.feed("ST") == "ST"
    assert watcher.feed("OP and more") == "OP"
    assert watcher.found == "STOP"


def lines_run(call: Callable[[], object]) -> int:
    """Lines of app/text/stop_strings.py that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line" and frame.f_code.co_filename.endswith("stop_strings.py")
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def test_a_token_costs_no_more_where_the_text_looks_much_like_a_long_stop() -> None:
    """It cost the length of every stop string: 67 ms a token for 16 of 8,000 characters."""
    watcher = StopStrings(["a" * 1000 + chr(98 + i) for i in range(16)])
    watcher.feed("a" * 999)
    watcher.feed("c")  # the stop that has it is not complete
    assert lines_run(lambda: [watcher.feed("a") for _ in range(50)]) < 50 * 16 * 30
    watcher.feed("a" * 950)
    assert lines_run(lambda: [watcher.feed("a") for _ in range(50)]) < 1000 * 16 * 30, (
        "once for each character of a stop"
    )
