"""Writes the table of metrics into docs/monitoring.md, from the table in app/telemetry/metrics.py.

python -m tools.metrics_docs           # rewrite the table
python -m tools.metrics_docs --check   # exit 1 when it is stale
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from app.telemetry.metrics import LABEL_VALUES, METRICS, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "monitoring.md"
BEGIN, END = "<!-- metrics: written by python -m tools.metrics_docs -->", "<!-- end of metrics -->"
OWN_LABELS = {"engine": "model_name, engine", "ingress": "ingress", "router": "router"}


def page() -> str:
    """The text of docs/monitoring.md, with the tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{chr(10).join(_tables())}\n\n{END}{after}"


def _tables() -> Iterator[str]:
    yield "| metric | kind | counted by | further labels | meaning |\n|---|---|---|---|---|"
    yield from map(_row, METRICS)
    yield "\n| label | values |\n|---|---|"
    for label, values in LABEL_VALUES.items():
        yield f"| `{label}` | {values if isinstance(values, str) else ', '.join(f'`{value}`' for value in values)} |"


def _row(metric: Metric) -> str:
    by = "; ".join(f"{scope} (`{OWN_LABELS[scope]}`)" for scope in metric.scopes)
    further = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {by} | {further} | {metric.help} |"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is fresh")
    fresh = page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != fresh)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
