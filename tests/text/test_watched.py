"""A call that does not end gives its thread back, and nobody else is interrupted."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.text import watched
from app.text.watched import OverrunError, run_watched
from tests.limits import patience_s, wait_until


def spin(is_over: Callable[[], bool]) -> None:
    while not is_over():
        pass


def test_what_it_returns_and_raises_passes() -> None:
    assert run_watched(lambda: 7, 60.0) == 7
    assert run_watched(lambda: 7, math.inf) == 7
    with pytest.raises(ZeroDivisionError):
        run_watched(lambda: 1 // 0, 60.0)


@pytest.mark.parametrize(("max_s", "max_cpu_s"), [(0.05, math.inf), (math.inf, 0.05)])
def test_a_call_without_end_is_interrupted_and_its_thread_goes_on(max_s: float, max_cpu_s: float) -> None:
    give_up = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            running = thread.submit(lambda: run_watched(lambda: spin(give_up.is_set), max_s, max_cpu_s))
            try:
                error = running.exception(patience_s())
            finally:
                give_up.set()
            assert isinstance(error, OverrunError)
            assert error.by_cpu is math.isfinite(max_cpu_s)
            give_up.clear()
        assert thread.submit(sum, range(100_000)).result(patience_s()) == sum(range(100_000))


def test_an_interrupt_never_comes_after_the_end() -> None:
    """Calls that end about when their time does: late or not, what follows them is not interrupted."""
    num_late = 0
    for number in range(300):
        try:
            run_watched(lambda number=number: sum(range(number % 30 * 3000)), 3e-4)  # type: ignore[misc]
        except OverrunError:
            num_late += 1
        assert sum(range(200)) == 19900
    assert num_late


def test_one_that_swallows_the_interrupt_is_interrupted_again() -> None:
    swallowed: list[BaseException] = []

    def stubborn() -> None:
        while True:
            try:
                spin(lambda: False)
            except BaseException as error:
                if swallowed:
                    raise
                swallowed.append(error)

    with pytest.raises(OverrunError):
        run_watched(stubborn, 0.01)
    assert len(swallowed) == 1


def test_an_interrupt_leaves_nothing_behind() -> None:
    """CPython 3.11 would loop in the first function that is traced, if it still took an exception for waiting."""

    traced: list[str] = []
    with pytest.raises(OverrunError):
        run_watched(lambda: spin(lambda: False), 0.01)
    sys.setprofile(lambda frame, event, argument: traced.append(event))
    try:
        run_watched(lambda: None, 10.0)
    finally:
        sys.setprofile(None)
    assert "call" in traced


def test_a_watch_that_waits_for_too_long_hears_of_what_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, give_up = watched._Watch(), threading.Event()
    wait, naps = watch._condition.wait, list[float | None]()

    def wait_long(timeout: float | None = None) -> bool:
        naps.append(timeout)
        return wait(None if len(naps) == 1 else timeout)  # as if its clock had been another

    monkeypatch.setattr(watch._condition, "wait", wait_long)
    monkeypatch.setattr(watched, "_WATCH", watch)
    assert run_watched(lambda: 7, 0.01) == 7
    wait_until(lambda: bool(naps), "the watch waits")
    watch._looks[0] = (0.0, *watch._looks[0][1:])  # long overdue
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: run_watched(lambda: spin(give_up.is_set), 0.01))
        try:
            assert isinstance(running.exception(patience_s()), OverrunError)
        finally:
            give_up.set()


def test_one_that_is_late_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt that comes while the call is still noted is the call's, and the last one."""
    noted, add = [], watched._WATCH.add

    def add_slowly(run: watched._Run, in_s: float) -> None:
        add(run, in_s)
        if threading.current_thread() is threading.main_thread():
            noted.append(run)
            while True:
                pass

    monkeypatch.setattr(watched._WATCH, "add", add_slowly)
    with pytest.raises(OverrunError):
        run_watched(lambda: None, 0.02)
    assert noted[0].check() is None
