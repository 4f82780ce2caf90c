"""A Ray cluster that an executor starts by itself, and workers that wait behind other processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import ray

from app.config.engine import EngineConfig
from app.engine.executor import own_ray
from app.engine.executor.ray_workers import RayWorkersExecutor
from app.errors import EngineDeadError


def test_it_begins_with_the_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the environment already stays."""
    given = dict.fromkeys(own_ray.SETTINGS, "of ours") | {"RAY_prestart_worker_first_driver": "1"}
    monkeypatch.setattr(own_ray, "SETTINGS", dict.fromkeys(own_ray.SETTINGS, "of ours"))
    monkeypatch.setattr(os, "environ", {"RAY_prestart_worker_first_driver": "1"})
    seen: list[dict[str, str]] = []

    def init(**_: object) -> None:
        seen.append(dict(os.environ))
        raise RuntimeError("far enough")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(EngineDeadError, match="far enough"):
        RayWorkersExecutor(EngineConfig()).start()
    assert seen == [given]


def _gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_workers_that_wait_behind_others_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("manta"), "propagate", True)
    started = "import os; os.setpriority(os.PRIO_PROCESS, 0, max(7, os.nice(0))); print(flush=True); input()"
    with (
        caplog.at_level(logging.WARNING, "manta.executor"),
        subprocess.Popen([sys.executable, "-c", started], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        own_ray.warn_of_niceness([])
        assert not caplog.messages
        own_ray.warn_of_niceness([_gone(), process.pid])
        niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
        process.communicate(b"\n")
    (line,) = caplog.messages
    assert f"nice {niceness}," in line
    assert "RAY_worker_niceness=0" in line
