"""The short form of the rig: two classes of faults, once each, against a real deployment of two replicas.

Over the fake engine in `make test`: tests/deployments/ingress/test_continuation.py shows
what a real one goes on with.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from loadtest.faults import results
from loadtest.faults.fault import Fault
from loadtest.faults.judge import NEVER
from loadtest.faults.mix import Ask, mixed
from loadtest.faults.series import Series
from loadtest.faults.shapes import Shape
from loadtest.faults.signals import send
from loadtest.faults.table import FAULTS

pytestmark = pytest.mark.timeout(300)


BOTH = Fault(
    "router_and_engine_killed", 0, "the Router, then an engine: SIGKILL",
    send(signal.SIGKILL, "router", "engine", after_s=0.5),
)  # fmt: skip


def _little_cpu(args: dict[str, Any]) -> None:
    """The fake engine needs little."""
    args["models"][0] |= {"cpus_per_worker": 0.01, "replica_cpus": 0.01}


FAKE = Shape("fake engines", _little_cpu, import_path="tests.deployments.fake_app:build", num_workers=0)
EARLY = 30  # a seed that strikes at a sixth of the streams, which a quick engine would have ended later on
BEYOND_IT = re.compile("schema|tools|regex|echo|prompt logprobs")  # asks that the fake engine cannot answer


def check(fault: Fault, asks: list[Ask], seed: int = 0) -> None:
    """In one run: streams that lose their replica find their next place without the Router."""
    with Series("test", asks) as series:
        run = series.run(fault, seed)
    assert (run.outcomes, run.findings) == ({"ok": len(asks)}, []), run.errors
    assert set(run.probes) == {"ok"}, run.errors
    assert run.whole_s is not None
    assert run.stalls_s, "no stream was on the replica that died"


def test_two_classes_of_faults_over_the_fake_engine() -> None:
    check(replace(BOTH, shape=FAKE), [ask for ask in mixed(600) if not BEYOND_IT.search(ask.name)])


@pytest.mark.slow
def test_two_classes_of_faults() -> None:
    check(BOTH, mixed(150), EARLY)


def one_run(name: str) -> results.Run:
    if FAULTS[name].obstacle():
        pytest.skip(FAULTS[name].obstacle())
    with Series("test", mixed(300)) as series:
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
