"""The limits of tests: they move with the machine, and no test has one of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tests import limits

pytest_plugins = ["pytester"]


class Machine:
    """A clock that only sleep moves, and a slowness."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(limits.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(limits.time, "sleep", made.sleep)
    monkeypatch.setattr(limits, "slowness", lambda kept_s=0.0: made.slowness)
    yield made
    monkeypatch.undo()


def test_a_limit_ends_after_a_second_look(machine: Machine) -> None:
    limit = limits.Limit(10)
    machine.now = 10.5
    assert limit.left_s() == 10  # a load that has just gone is not seen: it gets its time once more
    machine.now = 21
    assert limit.left_s() == 0


def test_a_limit_moves_while_the_machine_is_slow(machine: Machine) -> None:
    limit = limits.Limit(10)
    machine.now, machine.slowness = 10, 4.0
    assert limit.left_s() == 40
    machine.now, machine.slowness = 50, 8.0
    assert limit.left_s() == 80
    machine.now = 130
    assert limit.left_s() == 0


def test_a_wait_in_vain_says_for_what(machine: Machine) -> None:
    machine.slowness = 2.0
    with pytest.raises(AssertionError, match=r"\(5 s on a calm machine\) still not: rain"):
        limits.wait_until(lambda: False, "rain", 5)
    assert 20 <= machine.now < 20.1
    turns = itertools.count()
    assert limits.wait_until(lambda: next(turns) == 3, "the third turn")


def test_a_coroutine_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "slowness", lambda kept_s=0.0: 1.0)
    with pytest.raises(AssertionError, match="still not: the coroutine's end"):
        limits.run(asyncio.Event().wait(), 0.05)
    assert limits.run(asyncio.sleep(0, "done")) == "done"


def test_slowness_is_that_of_a_share_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= limits.slowness(0.0) < 1000
    seen = limits.slowness()
    monkeypatch.setattr(limits, "_PROBE_STEPS", 0)
    assert limits.slowness() == seen  # kept
    assert limits.slowness(0.0) == 1


TESTS = """
import time, pytest
from tests import limits

@pytest.mark.timeout(0.2)
@pytest.mark.parametrize(("slowness", "busy_s"), [(1.0, 30), (20.0, 0.6)])
def test_waits(slowness, busy_s, monkeypatch):
    monkeypatch.setattr(limits, "slowness", lambda kept_s=0.0: slowness)
    end = time.monotonic() + busy_s
    while time.monotonic() < end:
        pass
"""


def test_the_limit_of_a_whole_test_moves_too(pytester: pytest.Pytester) -> None:
    """pytest-timeout ends the first; the machine of the second is found slow when its time is over."""
    pytester.makeconftest("from tests.conftest import pytest_timeout_set_timer")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Failed: Timeout (>0.2s) from pytest-timeout.*"])
