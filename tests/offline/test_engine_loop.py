"""The one loop over an engine: what is sent runs, what nobody wants goes nowhere, an error leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.offline.engine_loop import EngineLoop


class Output:
    def __init__(self, request_id: str, finish_reason: str | None) -> None:
        self.request_id, self.finish_reason = request_id, finish_reason


class Request:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


class Core:
    """An engine whose requests have three outputs each; an aborted one has another, as the real engine's."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.aborted: list[str] = []
        self.most = 100

    @property
    def wants_more(self) -> bool:
        return len(self.left) < self.most

    def enqueue(self, request: Any) -> None:
        self.left[request.request_id] = 3

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += [name for name in names if self.left.pop(name, None)]

    def has_work(self) -> bool:
        return bool(self.left or self.aborted)

    def step(self) -> list[Any]:
        outputs, self.aborted = [Output(name, "abort") for name in self.aborted], []
        for name in list(self.left):
            self.left[name] -= 1
            outputs.append(Output(name, None if self.left[name] else "stop"))
            if not self.left[name]:
                del self.left[name]
        return outputs


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def loop(core: Core) -> EngineLoop:
    stands_for: Any = core
    return EngineLoop(stands_for)


def test_requests_are_made_as_the_engine_wants_them(loop: EngineLoop, core: Core) -> None:
    core.most, seen, made = 2, [], []

    def make() -> Iterator[Any]:
        for i in range(5):
            made.append(i)
            yield Request(str(i))

    def take(output: Any) -> None:
        seen.append((output.request_id, output.finish_reason))
        assert max(made) < 2 + len([reason for _, reason in seen if reason])

    loop.run(make(), take, in_pieces=True)
    assert [name for name, reason in seen if reason] == ["0", "1", "2", "3", "4"]
    with pytest.raises(ZeroDivisionError):  # what comes of a request that cannot be made
        loop.run((Request(str(1 // (3 - i))) for i in range(9)), lambda output: None, in_pieces=True)
    assert not core.has_work()


def test_requests_may_follow_others(loop: EngineLoop, core: Core) -> None:
    seen: list[str] = []

    def take(output: Any) -> None:
        seen.append(output.request_id)
        if output.request_id == "a" and output.finish_reason:
            loop.send([Request("b")])  # type: ignore[list-item]

    loop.run([Request("a")], take)  # type: ignore[list-item]
    assert seen == ["a"] * 3 + ["b"] * 3
    assert not core.has_work()


def test_what_was_ended_is_heard_of_no_more(loop: EngineLoop) -> None:
    seen: list[tuple[str, str | None]] = []

    def take(output: Any) -> None:
        seen.append((output.request_id, output.finish_reason))
        if output.request_id == "a":
            loop.end("a")

    loop.run([Request("a"), Request("b")], take)  # type: ignore[list-item]
    assert seen.count(("a", None)) == 1
    assert ("a", "abort") not in seen
    assert seen[-1] == ("b", "stop")


def test_an_error_leaves_an_empty_engine(loop: EngineLoop, core: Core) -> None:
    def fail(output: Any) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        loop.run([Request("a"), Request("b")], fail)  # type: ignore[list-item]
    assert not core.has_work()

    def requests() -> Any:
        yield Request("c")
        raise ValueError

    with pytest.raises(ValueError):
        loop.run(requests(), fail)
    assert not core.has_work()
