"""Runs are kept, counted and put into the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.faults import report, results, summary
from loadtest.faults.results import Run
from loadtest.faults.table import FAULTS


def make_run(fault: str, commit: str, **fields: Any) -> Run:
    base: dict[str, Any] = {
        "outcomes": {"ok": 10}, "probes": {"ok": 40}, "errors": [], "outage_s": 0.0, "served_s": None,
        "probe_max_s": 0.1, "whole_s": 8.0, "stalls_s": [], "longest_gap_s": 0.1, "itl_p99_before_s": 0.02,
        "itl_p99_after_s": 0.03, "findings": [], "load": 1.0, "commit": commit, "machine": "a machine",
    }  # fmt: skip
    return Run(fault, **(base | fields))


def test_what_an_interrupted_line_left_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    assert results.read(path) == []
    runs = [make_run("engine_killed", "abc", seed=seed) for seed in range(3)]
    for run in runs:
        results.append(path, run)
    path.write_text(path.read_text() + '{"fault": "engine_ki')
    assert results.read(path) == runs


def test_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    runs = [
        make_run(
            "engine_killed", "new", outcomes={"ok": 20, "error": 1}, stalls_s=[0.2, 0.4], findings=["leak: a block"]
        ),
        make_run("engine_killed", "new", outcomes={"ok": 19, "hung": 1, "wrong": 1}, probes={"ok": 9, "error": 2}),
        make_run("engine_killed", "other", outcomes={"cut": 99}),
    ]
    old = summary.of([make_run("engine_killed", "old", outcomes={"ok": 11, "error": 10})])
    summary.write(tmp_path / "page.before.json", {"engine_killed": old})
    report.write(page, list(FAULTS.values()), runs, ["new"])
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old\n" not in text
    cells = row_of(text, "engine_killed")
    assert cells[2:8] == [
        "2",
        "42",
        "1 (before: 10 of 21)",
        "0 (before: 0 of 21)",
        "0, 1, 1 (before: 0 of 21)",
        "2 of 51",
    ]
    assert cells[10] == "300 / 398"
    assert cells[12:] == ["1, 0", "A"]
    assert "A: new, on a machine." in text
    assert "- `engine_killed`: leak: a block (1 times)" in text
    widths = {len(line.split("|")) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "rows of different width"
    assert {f"`{name}`" for name in FAULTS} <= set(text.replace(":", " ").split())


def test_faults_without_new_runs_keep_their_rows(tmp_path: Path) -> None:
    """What other machines and earlier commits have shown is kept beside the page."""
    page = tmp_path / "page.md"
    page.write_text(f"{report.BEGIN}{report.END}")
    chosen = [FAULTS[name] for name in ("engine_killed", "poison")]
    report.write(page, chosen, [make_run("engine_killed", "old"), make_run("poison", "old")], ["old"])
    new = [make_run("poison", "new", machine="another"), make_run("poison", "new2")]
    report.write(page, chosen, new, ["new", "new2"])
    text = page.read_text()
    assert row_of(text, "engine_killed")[2:4] == ["1", "10"]
    assert row_of(text, "poison")[2:4] == ["2", "20"]
    assert "B: old, on a machine." in text
    assert "A: new, new2, on a machine and another." in text
    assert "In all 3 runs with 30 streams" in text


def row_of(text: str, fault: str) -> list[str]:
    (row,) = [line for line in text.splitlines() if f"| `{fault}`" in line]
    return [cell.strip() for cell in row.removesuffix("|").removeprefix("|").split("|")]


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="to write the table between"):
        report.write(page, [], [], ["new"])
    assert page.read_text() == "nothing"


def test_all_24_classes_have_a_fault() -> None:
    assert {fault.case for fault in FAULTS.values()} >= set(range(1, 25))
    assert all(name == fault.name for name, fault in FAULTS.items())
