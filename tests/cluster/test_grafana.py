"""The boards of cluster/grafana: current, and each expression asks for metrics and labels that Manta exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cluster.promql import exposed, labels_in, metrics_in
from tools.boards import BOARDS, PLACE, Panel, board, made
from tools.cluster_manifests import ROOT

OF_REPLICAS = {"model_name", "engine", "ingress"}  # what tells the series of replicas apart
PANELS = [pytest.param(panel, id=f"{name}: {panel.title}") for name, panels in BOARDS.items() for panel in panels]


def plain(expression: str) -> str:
    """The expression as Prometheus gets it."""
    return re.sub(r"\$(\w+)", lambda found: "1m" if "interval" in found.group(1) else ".*", expression)


def test_the_files_are_those_of_the_table() -> None:
    assert {path: path.read_text() for path in PLACE.glob("*.json")} == made(), "run python -m tools.boards"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_what_there_is(panel: Panel) -> None:
    series = exposed()
    for expression, legend in panel.series:
        metrics = metrics_in(plain(expression))
        assert metrics <= series.keys()
        known = OF_REPLICAS.union(*(series[metric] for metric in metrics))
        assert labels_in(plain(expression)) <= known
        assert set(re.findall(r"{{(\w+)}}", legend)) <= known


def test_every_metric_that_replicas_count_is_on_a_board() -> None:
    shown = {
        metric for panels in BOARDS.values() for panel in panels for expr, _ in panel.series
        for metric in metrics_in(plain(expr))
    }  # fmt: skip
    families = {re.sub("_(bucket|sum|count)$", "", metric) for metric in exposed()}
    assert families <= {re.sub("_(bucket|sum|count)$", "", metric) for metric in shown} | NOT_SHOWN


NOT_SHOWN = {
    "vllm:request_max_num_generation_tokens",  # as request_params_max_tokens
    "vllm:kv_offload_cpu_cache_usage_perc",  # as manta:kv_host_...
    "vllm:kv_offload_store_bytes_total",
    "vllm:kv_offload_load_bytes_total",
    "vllm:lora_requests_info",  # its value is a time, its labels are lists
}


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_one_grafana_can_place(name: str) -> None:
    made = board(name)
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]}
    assert len(places) == len(made["panels"])
    variables = {variable["name"] for variable in made["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(made["panels"]))) <= variables


def test_grafana_finds_boards_and_prometheus() -> None:
    provisioning = ROOT / "cluster/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/manta.yml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "cluster/docker/compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    assert mounts["../grafana/boards"] == provider["options"]["path"]
    assert Path(mounts["../grafana/provisioning"]) == Path("/etc/grafana/provisioning")
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose
