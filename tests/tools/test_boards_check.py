"""What tools.boards_check asks Prometheus for."""

from __future__ import annotations

import json

from tests.cluster.promql import metrics_in
from tools.boards import PLACE
from tools.boards_check import expressions, filled


def test_every_expression_of_our_boards_is_asked_for_in_promql() -> None:
    for path in PLACE.glob("*.json"):
        board = json.loads(path.read_text())
        found = list(expressions(board))
        assert len(found) == sum(len(panel["targets"]) for panel in board["panels"])
        assert all(metrics_in(filled(expression, "m")) for _, expression in found)


def test_variables_are_filled_in_as_grafana_would() -> None:
    assert filled('rate(a{model_name="$model_name"}[$__rate_interval])', "m") == 'rate(a{model_name="m"}[2m])'
    assert filled('a{b=~"$b", c=~"${c:regex}"}', "m") == 'a{b=~".*", c=~".*"}'


def test_panels_of_folded_rows_are_found() -> None:
    inner = {"title": "inner", "targets": [{"expr": "a"}, {"refId": "B"}]}
    assert list(expressions({"panels": [{"title": "row", "panels": [inner]}]})) == [("inner", "a")]
