"""Workers that answer live, however long their steps; one that does not answer is found without waiting for it."""

from __future__ import annotations

import socket
import sys
from types import FrameType

import pytest

from app.engine.executor.worker_group import signs_of_life
from app.engine.executor.worker_group.connection import FrameConnection
from app.engine.executor.worker_group.phase import is_compiling
from app.engine.executor.worker_group.signs_of_life import ASK, MAX_UNANSWERED, SignsOfLife


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[SignsOfLife, list[FrameConnection]]:
    """Two ranks, asked at every look, and their own ends."""
    monkeypatch.setattr(signs_of_life, "ASK_INTERVAL_S", 0.0)
    pairs = [socket.socketpair() for _ in range(2)]
    lifelines = {rank: FrameConnection(ours) for rank, (ours, _) in enumerate(pairs)}
    return SignsOfLife(lifelines), [FrameConnection(theirs) for _, theirs in pairs]


def answer(end: FrameConnection, text: str) -> None:
    while (question := end.try_recv()) is not None:
        assert question == ASK
        end.send(text.encode())


def test_the_silent_one_is_named_and_asked_once(ends: tuple[SignsOfLife, list[FrameConnection]]) -> None:
    signs, (first, second) = ends
    for _ in range(3 * MAX_UNANSWERED):
        assert signs.look() is None
        answer(first, "step 7 for 100.0 s")
        answer(second, "waiting")
    for _ in range(MAX_UNANSWERED - 1):
        assert signs.look() is None
        answer(first, "step 8 for 1.0 s")
    assert signs.look() == 1
    assert second.try_recv() == ASK
    assert second.try_recv() is None
    assert signs.answers[0] == "step 8 for 1.0 s"
    second.send(b"back again")
    assert signs.look() is None


def test_a_closed_lifeline_is_not_silence(ends: tuple[SignsOfLife, list[FrameConnection]]) -> None:
    """Its other connection says that the rank is gone."""
    signs, (first, second) = ends
    second.close()
    for _ in range(3 * MAX_UNANSWERED):
        assert signs.look() is None
        answer(first, "waiting")


def test_whoever_compiles_is_known_by_its_stack() -> None:
    frames: list[FrameType] = []
    namespace = {"__name__": "triton.compiler.compiler", "take": lambda: frames.append(sys._getframe())}
    exec("def compile(): take()", namespace)
    namespace["compile"]()  # type: ignore[operator]
    assert is_compiling(frames[0])
    assert not is_compiling(sys._getframe())
    assert not is_compiling(None)
