"""What Ray's metrics agent exports of an engine's metrics, as the expressions of Ray's own Serve LLM board read it."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.dashboard.modules.metrics.dashboards import serve_llm_dashboard_panels as board

from app.deployments.replica.engine_metrics import EngineMetrics
from app.deployments.replica.ray_metrics import HISTOGRAMS, RayMirror
from app.telemetry.metrics_recorder import MetricsRecorder
from tests import limits
from tests.deployments.replica.test_engine_metrics import stats, timings

# Series of features that do not exist here.
ABSENT = ("nixl_", "kv_offload_", "num_requests_swapped")


def recorded() -> EngineMetrics:
    metrics = EngineMetrics(MetricsRecorder({"model_name": "mirrored", "engine": "0"}))
    for name in ("a", "b", "c"):
        metrics.record_finished(timings(name, "stop"))
    metrics._recorder.observe("vllm:time_to_first_token_seconds", 0.02)
    return metrics


def test_only_what_changed_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, float]] = []

    class Gauge:
        def __init__(self, name: str, help: str, keys: tuple[str, ...]) -> None:
            assert re.fullmatch(r"[a-z0-9_]+", name)
            self._name, self._keys = name, set(keys)

        def set_default_tags(self, tags: dict[str, str]) -> None:
            self._keys -= tags.keys()

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tags.keys() == self._keys
            sent.append((self._name, value))

    monkeypatch.setattr("app.deployments.replica.ray_metrics.Gauge", Gauge)
    metrics = recorded()
    mirror = RayMirror(metrics.labels)
    mirror.publish(metrics.refresh(stats(num_running=2)))
    first = dict(sent)
    assert first["vllm_num_requests_running"] == 2
    assert sum(value for name, value in sent if name == "vllm_request_success_total") == 3
    assert first["vllm_e2e_request_latency_seconds_sum"] == 3
    sent.clear()
    mirror.publish(metrics.refresh(stats(num_running=3)))
    assert sent == [("vllm_num_requests_running", 3)]


def exported(port: int) -> dict[str, list[dict[str, str]]]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=limits.patience_s()).text
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def panels() -> str:
    return " ".join(value for name, value in _texts(vars(board)))


def _texts(names: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for name, value in names.items():
        for panel in value if isinstance(value, list) else ():
            found += [(name, target.expr) for target in getattr(panel, "targets", None) or ()]
    return found


def test_ray_s_board_finds_its_series(ray_cluster: str) -> None:
    @ray.remote(num_cpus=0)
    class Replica:
        def publish(self) -> None:
            metrics = recorded()
            self._mirror = RayMirror(metrics.labels)
            self._mirror.publish(metrics.refresh(stats(num_running=2, figures={"prompt_tokens": 9})))

    replica = Replica.remote()
    ray.get(replica.publish.remote())
    port = ray.nodes()[0]["MetricsExportPort"]
    limits.wait_until(lambda: "ray_vllm_num_requests_running" in exported(port), "Ray's agent exports")
    found = exported(port)
    asked = set(re.findall(r"ray_(vllm_\w+)", panels()))
    assert len(asked) > 20
    missing = {name for name in asked if f"ray_{name}" not in found and not name[5:].startswith(ABSENT)}
    assert not missing
    for name in HISTOGRAMS:
        buckets = found["ray_" + name.replace(":", "_") + "_bucket"]
        assert all(labels["model_name"] == "mirrored" and labels["WorkerId"] and labels["le"] for labels in buckets)
