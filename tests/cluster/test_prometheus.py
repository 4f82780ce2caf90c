"""The rules of cluster/prometheus: promtool reads and tries them, and each asks for what Manta exposes."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from app.telemetry.metrics import TTFT_S
from tests.cluster.promql import exposed, metrics_in
from tools.cluster_manifests import ROOT

PLACE = ROOT / "cluster/prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PLACE / "manta.rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = sorted({rule["alert"] for rule in RULES if "alert" in rule})
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs prometheus and redis-server")


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=PLACE, capture_output=True, text=True, check=False)


@needs_promtool
def test_promtool_reads_them() -> None:
    found = promtool("check", "rules", "manta.rules.yml")
    assert found.returncode == 0, found.stderr


@needs_promtool
def test_each_alert_comes_when_it_should_and_not_before() -> None:
    found = promtool("test", "rules", "manta.test.yml")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_tried_and_says_what_is_wrong(alert: str) -> None:
    tried = {
        case["alertname"]
        for test in yaml.safe_load((PLACE / "manta.test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert alert in tried
    for rule in RULES:
        if rule.get("alert") == alert:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert rule["annotations"]["summary"]


def test_each_rule_asks_for_metrics_that_there_are() -> None:
    known = {*exposed(), "up", *(rule["record"] for rule in RULES if "record" in rule)}
    for rule in RULES:
        assert metrics_in(rule["expr"]) <= known, rule


def test_the_objective_is_a_bucket() -> None:
    bounds = set(re.findall(r'le="([^"]+)"', (PLACE / "manta.rules.yml").read_text()))
    assert bounds
    assert bounds <= {str(bound) for bound in TTFT_S}
