"""docs/deploying.md and docs/monitoring.md name what there is, and all of it."""

from __future__ import annotations

import re

import pytest
from helm_python import Chart

from tests.cluster.test_prometheus import ALERTS
from tools.cluster_manifests import CHART, ROOT, render, variants

DOCS = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("deploying", "monitoring")}


@pytest.mark.parametrize("text", DOCS.values(), ids=DOCS)
def test_files_and_links_that_they_name_are_there(text: str) -> None:
    named = set(re.findall(r"\b(?:cluster|configs|app)/[\w./*-]*\w", text))
    missing = [path for path in named if not list(ROOT.glob(path)) and "NAME" not in path]
    links = [ROOT / "docs" / link for link in re.findall(r"\]\(([^)#:]+)", text)]
    assert missing == []
    assert all(link.exists() for link in links)
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_every_variant_and_every_alert_is_explained() -> None:
    assert all(f"`{variant}`" in DOCS["deploying"] for variant in variants())
    assert all(f"`{alert}`" in DOCS["monitoring"] for alert in ALERTS)


def test_the_chart_knows_the_values_that_the_commands_set() -> None:
    for path in re.findall(r"--set ([\w.]+)=", DOCS["deploying"]):
        value: object = "x"
        for key in reversed(path.split(".")):
            value = {key: value}
        with Chart.load(CHART) as chart:
            chart.validate_schema(value)  # type: ignore[arg-type]


def test_the_secrets_of_the_commands_are_those_that_the_chart_asks_for() -> None:
    made = dict(re.findall(r"secret generic (\S+) --from-literal=(\w+)=", DOCS["deploying"]))
    text = render({"apiKeys": {"existingSecret": "manta-keys"}})
    assert set(re.findall(r'secretName: "([^"]+)"', text)) <= made.keys()
    assert ("manta-redis", "password") in made.items()
    assert re.search(r'name: "manta-redis"\s+key: password', text)
