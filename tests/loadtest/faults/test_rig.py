"""The short form of the rig: two classes of faults, once each, against a real deployment of two replicas."""

from __future__ import annotations

import signal

import pytest

from loadtest.faults import results
from loadtest.faults.fault import Fault
from loadtest.faults.judge import NEVER
from loadtest.faults.mix import mixed
from loadtest.faults.series import Series
from loadtest.faults.signals import send
from loadtest.faults.table import FAULTS

pytestmark = pytest.mark.timeout(300)


BOTH = Fault(
    "router_and_engine_killed", 0, "the Router, then an engine: SIGKILL",
    send(signal.SIGKILL, "router", "engine", after_s=0.5),
)  # fmt: skip


def test_two_classes_of_faults() -> None:
    """In one run: streams that lose their replica find their next place without the Router."""
    with Series("test", num_tokens=40) as series:
        run = series.run(BOTH, 0)
    assert (run.outcomes, run.findings) == ({"ok": len(mixed(1))}, []), run.errors
    assert set(run.probes) == {"ok"}, run.errors
    assert run.whole_s is not None


def one_run(name: str) -> results.Run:
    if FAULTS[name].obstacle():
        pytest.skip(FAULTS[name].obstacle())
    with Series("test", num_tokens=300) as series:
        return series.run(FAULTS[name], 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_down_20s", "gcs_down_75s"])
def test_a_gcs_with_redis_may_be_gone(name: str) -> None:
    """docs/running.md: nobody notices, and no process ends."""
    run = one_run(name)
    assert (set(run.outcomes), set(run.probes), run.findings) == ({"ok"}, {"ok"}, []), run.errors


@pytest.mark.slow
def test_a_gcs_without_redis_is_a_fuse_of_a_minute() -> None:
    """docs/running.md: requests are served for a minute, then nothing is."""
    run = one_run("gcs_killed")
    assert run.served_s is not None
    assert 50 < run.served_s < 75
    assert not any(run.outcomes.get(kind) for kind in NEVER), run.errors
