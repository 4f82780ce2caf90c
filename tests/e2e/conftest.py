"""One quickstart server for all end-to-end tests that do not break it, and the file their figures go to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.limits import patience_s

RESULTS = ROOT / "results" / "acceptance.json"
_results_lock = threading.Lock()

Record = Callable[[str, Any], None]


@pytest.fixture(scope="session")
def quickstart() -> Iterator[ServeProcess]:
    """`serve run configs/serve/quickstart.yaml`, on a free port."""
    config = ROOT / "configs/serve/quickstart.yaml"
    with ServeProcess(config, ready_timeout_s=patience_s(), ends_gracefully=False) as server:
        yield server


@pytest.fixture(scope="session")
def client(quickstart: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{quickstart.base_url}/v1", api_key="none", max_retries=0, timeout=patience_s())


@pytest.fixture
def record() -> Record:
    """Keep a measured figure in results/acceptance.json."""

    def write(name: str, value: Any) -> None:
        with _results_lock:
            RESULTS.parent.mkdir(exist_ok=True)
            figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            figures[name] = value
            RESULTS.write_text(json.dumps(figures, indent=2, sort_keys=True))
        print(f"{name}: {value}")

    return write


def metric(text: str, name: str) -> float:
    """Sum of a metric's samples over all labels."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))


def wait_until(condition: Callable[[], bool], calm_s: float, what: str) -> float:
    """Seconds until `condition` held; fails the test when it does not."""
    limit = limits.Limit(calm_s)
    limits.wait_until(condition, what, calm_s)
    return limit.passed_s


def heldout() -> list[dict[str, Any]]:
    """The built-in model's held-out questions."""
    path = Path(ROOT / "app/assets/tiny-chat/heldout.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
