"""Whether boards show anything: `python -m tools.boards_check --url http://127.0.0.1:9090 [--boards FILE ...] [--ray]`.

Asks a Prometheus that scrapes a loaded Manta for every expression of every panel, with Grafana's variables filled in as
Grafana would, and prints those without data. Boards are ours unless named; --ray adds that of Ray Serve LLM.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.boards import PLACE

TIMEOUT_S = 60.0
# What Grafana, or the board's author, puts into the place of a variable; any other selects everything.
VARIABLES = {"__rate_interval": "2m", "__interval": "2m", "interval": "2m", "__range": "10m", "agg_method": "0.99"}


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(title, expression) of each series of each panel, those in folded rows too."""
    for panel in board.get("panels", []):
        for target in panel.get("targets", []):
            if target.get("expr"):
                yield str(panel.get("title")), target["expr"]
        yield from expressions(panel)


def filled(expression: str, model: str) -> str:
    """The expression as Prometheus gets it. A variable that is compared by `=` is the model's name."""
    equal = re.sub(r'="\$\{?\w+\}?"', f'="{model}"', expression)
    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda found: VARIABLES.get(found.group(1), ".*"), equal)


def ask(url: str, expression: str) -> tuple[bool, str]:
    """Whether it returns data, and the error where Prometheus refuses it."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=TIMEOUT_S) as answer:
            return bool(json.load(answer)["data"]["result"]), ""
    except urllib.error.HTTPError as error:
        return False, json.load(error).get("error", str(error))


def ray_board() -> dict[str, Any]:
    """The board of Ray Serve LLM, as Ray's dashboard writes it for Grafana."""
    from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_serve_llm_grafana_dashboard

    board: dict[str, Any] = json.loads(generate_serve_llm_grafana_dashboard()[0])
    return board


def check(url: str, name: str, board: dict[str, Any], model: str) -> int:
    """Print the panels without data; returns how many expressions have none."""
    lines = []
    total = 0
    for title, expression in expressions(board):
        total += 1
        found, error = ask(url, filled(expression, model))
        if not found:
            lines.append(f"| {name} | {title} | {error or ', '.join(metrics_of(expression))} |")
    print(f"{name}: {total - len(lines)} of {total} expressions return data")
    print(*lines, sep="\n")
    return len(lines)


def metrics_of(expression: str) -> list[str]:
    """The metrics that it names."""
    return sorted(set(re.findall(r"\b(?:vllm:|manta:|ray_|http_|process_)\w+", expression)))


def main() -> int:
    """Exit code 1 where an expression of ours returns nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:9090")
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--boards", type=Path, nargs="*", default=[], help="further boards, as JSON")
    parser.add_argument("--ray", action="store_true", help="that of Ray Serve LLM too")
    args = parser.parse_args()
    failed = sum(
        check(args.url, path.stem, json.loads(path.read_text()), args.model) for path in sorted(PLACE.glob("*.json"))
    )
    for path in args.boards:
        check(args.url, path.stem, json.loads(path.read_text()), args.model)
    if args.ray:
        check(args.url, "Ray Serve LLM", ray_board(), args.model)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
