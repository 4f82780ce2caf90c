"""An idle deployment must not burn cores: CPU over 30 s, against the same Serve shape with nothing inside."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.e2e.conftest import Record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 30.0


def _idle_cores(config: Path, edit: object = None) -> float:
    with ServeProcess(config, edit) as server:
        limits.pause(15)
        begin_cpu, begin = server.cpu_time_s(), time.monotonic()
        limits.pause(SECONDS)
        return (server.cpu_time_s() - begin_cpu) / (time.monotonic() - begin)


def test_idle_quickstart(record: Record) -> None:
    ours = {
        transport: _idle_cores(
            ROOT / "configs/serve/quickstart.yaml",
            lambda config, transport=transport: (
                config["applications"][0]["args"]["models"][0].setdefault("engine", {}).update(step_transport=transport)
            ),
        )
        for transport in ("socket", "compiled_graph")
    }
    nothing = _idle_cores(ROOT / "tests/e2e/idle_baseline.yaml")
    record("idle_cores", {"nothing": round(nothing, 4), **{k: round(v, 4) for k, v in ours.items()}})
    for transport, cores in ours.items():
        assert cores - nothing <= 0.05, f"{transport}: {cores:.3f} of a core, against {nothing:.3f}"
