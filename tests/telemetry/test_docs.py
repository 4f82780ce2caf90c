"""docs/monitoring.md lists every metric, as the table has them now."""

from __future__ import annotations

from tools import metrics_docs


def test_the_table_is_fresh() -> None:
    fresh = metrics_docs.PAGE.read_text(encoding="utf-8") == metrics_docs.page()
    assert fresh, "docs/monitoring.md is stale: run python -m tools.metrics_docs"
