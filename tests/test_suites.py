"""What starts servers, clusters or groups of worker processes is in one of the Makefile's two suites of processes.

In the half that runs a process for each core it would have one core, and each of those processes would start its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.parts import ROOT, suites

STARTS = re.compile(
    r"\bServeProcess\b|\bray_cluster\b|\bray\.init\(|\bRayWorkersExecutor\(|\bLocalProcessesExecutor\b|\bSeries\("
)


def test_the_lists_name_what_there_is_once() -> None:
    listed = [path for paths in suites().values() for path in paths]
    assert suites().keys() == {"SERVERS", "WORKERS"}
    assert len(set(listed)) == len(listed)
    assert [path for path in listed if not (ROOT / path).exists()] == []


def test_the_other_half_starts_none() -> None:
    listed = tuple(path for paths in suites().values() for path in paths)
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__).resolve()]
    names = [
        str(path.relative_to(ROOT))
        for path in others
        if STARTS.search(path.read_text()) and not str(path.relative_to(ROOT)).startswith(listed)
    ]
    assert names == [], "to be listed in the Makefile's SERVERS or WORKERS"
