"""The limits of tests: they move with the machine, and no test has one of its own."""

from __future__ import annotations

import ast
import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import limits

pytest_plugins = ["pytester"]


TESTS_ROOT = Path(__file__).resolve().parent
FILES = {str(path.relative_to(TESTS_ROOT)): path for path in sorted(TESTS_ROOT.rglob("*.py"))}
CLOCKS = {"time.sleep", "asyncio.sleep", "time.monotonic", "time.perf_counter"}
PLAYS = "plays something that takes its time"
TIMED = "a figure of make acceptance"
OWN_CLOCK = {
    "limits.py": "the one place",
    "api/conftest.py": PLAYS,
    "api/generation/test_render.py": "how often the event loop turns while a thread works, not how long that takes",
    "api/openai/audio/test_endpoint.py": PLAYS,
    "cli/fake_server.py": PLAYS,
    "deployments/fake_engine.py": PLAYS,
    "e2e/test_acceptance.py": TIMED,
    "e2e/test_closed.py": TIMED,
    "e2e/test_faults.py": TIMED,
    "e2e/test_worker_group_faults.py": TIMED,
    "e2e/test_idle.py": TIMED,
    "engine/executor/fake_worker.py": PLAYS,
    "engine/scheduler/test_deadlines.py": "deadlines of a clock that the test sets",
    "records/test_block_hash.py": TIMED,
    "engine/scheduler/test_admission.py": "the product's own clock",
    "engine/scheduler/test_step_cost.py": TIMED,
    "engine/test_async_engine.py": PLAYS,
    "kernels/gluon_on_cpu.py": "a turn for another thread, however long that takes",
    "loadtest/conftest.py": PLAYS,
    "test_limits.py": "its examples",
}
WAITS = {"wait", "join", "result", "exception"}  # take a limit, as any keyword is with "timeout" in its name


class Machine:
    """A clock that only sleep moves, and a slowness."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
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


def own_limits(source: str, own_clock: bool) -> list[str]:
    """What a test file says about time in numbers of its own, with lines."""
    tree, found = ast.parse(source), []
    numbers = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _is_number(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CLOCKS and not own_clock:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if not isinstance(node, ast.Call) or "mark." in ast.unparse(node.func):
            continue
        values = [keyword.value for keyword in node.keywords if "timeout" in (keyword.arg or "")]
        if ast.unparse(node.func) == "asyncio.wait_for":
            values += node.args[1:2]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            values += node.args[:1]
        found += [f"line {node.lineno}: {ast.unparse(node)}" for value in values if _is_number(value, numbers)]
    return found


def _is_number(node: ast.expr, names: set[str]) -> bool:
    """Whether it is a positive number, or a name for one."""
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value > 0


def test_no_test_has_a_limit_of_its_own() -> None:
    """tests/limits.py has what they need; `asyncio.sleep(0)` is a turn of the loop."""
    sources = {name: path.read_text().replace("asyncio.sleep(0)", "asyncio.turn()") for name, path in FILES.items()}
    found = {name: own for name, source in sources.items() if (own := own_limits(source, name in OWN_CLOCK))}
    assert not found


def test_exceptions_are_needed() -> None:
    for name in OWN_CLOCK:
        assert own_limits(FILES[name].read_text(), False), f"{name} needs no exception any more"


@pytest.mark.parametrize(
    "line",
    ["time.sleep(0.3)", "end = time.monotonic() + 5", "thread.join(10)", "asyncio.wait_for(task, 5)", "f(timeout_s=3)",
     "LIMIT_S = 3.0\nhttpx.get(url, timeout=LIMIT_S)"],
)  # fmt: skip
def test_what_is_a_limit(line: str) -> None:
    assert own_limits(line, False)
    assert not own_limits("thread.join(limits.patience_s())\nx.wait()\n' '.join(words)\npytest.mark.timeout(9)", False)


def test_no_test_sets_the_clock_of_the_whole_process() -> None:
    """`module.time` is everybody's: threads of other tests would wait by a clock that is taken back."""
    sets = re.compile(r"""setattr\((?:[\w.]+\.)?time, "|setattr\("time\.""")
    assert not [name for name, path in FILES.items() if sets.search(path.read_text())]
