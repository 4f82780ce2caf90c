"""Plain manifests of the Helm chart: `python -m tools.cluster_manifests` writes cluster/kuberay/*.yaml.

The chart is the only source; each file of cluster/kuberay/values is one rendering of it, for whoever uses `kubectl
apply`, or wants to read what he gets. The alert rules are written a second time too, as the Prometheus operator reads
them, and the schema of the chart's values has the fields of ServeConfig (app/config/serve.py): Helm refuses what
the server would. A test holds that the files are current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from app.config.serve import ServeConfig

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "cluster/helm/manta"
SCHEMA = CHART / "values.schema.json"
KUBERAY = ROOT / "cluster/kuberay"
RULES = ROOT / "cluster/prometheus/manta.rules.yml"
RELEASE = "manta"  # name and namespace of the plain manifests
HEADER = "# Made by `python -m tools.cluster_manifests` from {source}: edit that.\n"


def variants() -> dict[str, Path]:
    """Files of values, by the name of their variant."""
    return {path.stem: path for path in sorted((KUBERAY / "values").glob("*.yaml"))}


def render(values: dict[str, Any], name: str = RELEASE) -> str:
    """All manifests of the chart as one YAML stream, the RayService last: it wants the others to be there."""
    with Chart.load(CHART) as chart:
        files = chart.render(values=values, name=name, namespace=name)
    manifests = {Path(path).stem: text.strip() for path, text in files.items() if path.endswith(".yaml")}
    last = manifests.pop("rayservice")
    return "\n---\n".join([*(manifests[key] for key in sorted(manifests) if manifests[key]), last]) + "\n"


def prometheus_rule() -> str:
    """The rules as a PrometheusRule of the Prometheus operator."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": RELEASE, "labels": {"app.kubernetes.io/part-of": "manta"}},
        "spec": yaml.safe_load(RULES.read_text()),
    }
    return yaml.safe_dump(rule, sort_keys=False, width=120)


def values_schema() -> str:
    """The schema of the chart's values, with what `serve` may hold as the configuration has it now."""
    schema = json.loads(SCHEMA.read_text())
    config = _bare(ServeConfig.model_json_schema())
    own = {name: each for name, each in schema["$defs"].items() if name[0].islower()}
    schema["$defs"] = {**own, **dict(sorted(config["$defs"].items()))}
    schema["properties"]["serve"]["properties"] |= config["properties"]
    return json.dumps(schema, indent=2) + "\n"


def _bare(schema: Any) -> Any:
    """What a schema checks, without its words."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    words = ("title", "description", "default", "examples")
    return {key: _bare(each) for key, each in schema.items() if key not in words or isinstance(each, dict)}


def made() -> dict[Path, str]:
    """Every file that this module writes, with its text."""
    files = {
        KUBERAY / f"{name}.yaml": _header(path) + render(yaml.safe_load(path.read_text()) or {})
        for name, path in variants().items()
    }
    files[SCHEMA] = values_schema()
    files[RULES.with_name("prometheusrule.yaml")] = _header(RULES) + prometheus_rule()
    return files


def _header(source: Path) -> str:
    return HEADER.format(source=source.relative_to(ROOT))


def main() -> None:
    """Write the files, and say which changed; the schema first, which Helm holds the values against."""
    SCHEMA.write_text(values_schema())
    for path, text in made().items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
