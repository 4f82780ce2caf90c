"""A soak's verdict and what it reads; the soak itself takes an hour or two."""

from __future__ import annotations

from typing import Any

import psutil

from app.telemetry.exposition import render
from app.telemetry.metrics import METRICS
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot
from loadtest import memory
from loadtest.soak import SMALL, edit, table, verdict


def samples(number: int, grow_mb: float = 0.0, grow_entries: float = 0.0, grow_batches: float = 0.0) -> Any:
    """Samples in which things grow by so much from one to the next."""
    return [
        {
            "minute": float(i),
            "processes": {"engine": {"rss": 200.0, "pss": 100 + grow_mb * i}},
            "structures": {
                'manta:ingress_stored_entries{store="responses"}': 50 + grow_entries * i,
                'manta:ingress_stored_entries{store="batches"}': grow_batches * i,
            },
        }
        for i in range(number)
    ]


def test_the_verdict_is_of_the_last_half() -> None:
    assert verdict(samples(40), 8.0) == []
    assert verdict(samples(40, grow_mb=0.5, grow_batches=1.0), 8.0) == []  # batches are kept up to their bound
    assert verdict(samples(40, grow_mb=1.0), 8.0) == ["engine: PSS grew from 124 to 134 MiB"]
    assert verdict(samples(40, grow_entries=1.0), 8.0) == [
        'manta:ingress_stored_entries{store="responses"} grew from 74 to 84'
    ]  # fmt: skip
    warm = samples(20, grow_mb=10.0) + samples(20)
    assert verdict(warm, 8.0) == []
    assert verdict(samples(3), 8.0) == ["too short: at least four samples are needed"]


def test_the_table_shows_begin_half_and_end() -> None:
    lines = table(samples(9, grow_mb=10.0, grow_entries=1.0)).splitlines()
    assert lines[0] == "| | minute 0 | minute 4 | minute 8 |"
    assert "| engine, MiB PSS (RSS) | 100 (200) | 140 (200) | 180 (200) |" in lines
    assert '| manta:ingress_stored_entries{store="responses"} | 50 | 54 | 58 |' in lines


def test_structures_are_those_that_the_metrics_have() -> None:
    recorder = MetricsRecorder({"ingress": "i"}, scope="ingress")
    recorder.set("manta:ingress_stored_entries", 3, "files")
    recorder.set("manta:ingress_held_bytes", 7, "bodies")
    recorder.set("manta:ingress_requests", 2)
    other = MetricsRecorder({"ingress": "j"}, scope="ingress")
    other.set("manta:ingress_requests", 4)
    page = render([decode_snapshot(one.snapshot()) for one in (recorder, other)])
    found = memory.of_structures(page)
    assert found['manta:ingress_stored_entries{store="files"}'] == 3
    assert found['manta:ingress_held_bytes{held="bodies"}'] == 7
    assert found["manta:ingress_requests"] == 6
    assert set(memory.COUNTED) <= {metric.name for metric in METRICS}


def test_processes_are_counted_by_name() -> None:
    own = memory.of_processes([psutil.Process()])
    (figures,) = own.values()
    assert 0 < figures["pss"] <= figures["rss"]


def test_its_options_are_options_of_the_server() -> None:
    from app.config.ingress import IngressConfig

    config: dict[str, Any] = {"applications": [{"args": {"models": [{"engine": {}}]}}]}
    edit(config)
    assert set(SMALL) <= set(IngressConfig.model_fields)
    assert config["applications"][0]["args"]["models"][0]["engine"]["kv_cache_memory_bytes"] < 1 << 28
