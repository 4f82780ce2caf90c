"""Writes the results' table into a page, between two marks, from the summaries kept beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.faults import summary
from loadtest.faults.fault import Fault
from loadtest.faults.judge import NEVER
from loadtest.faults.results import Run
from loadtest.faults.summary import Summary
from loadtest.faults.table import FAULTS

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
_HEAD = (
    "| class | fault | runs | streams | error | lost | cut, wrong, hung | probes failed | outage, s | whole after, s "
    "| stall of moved streams, ms | ITL p99 of the others, ms | leaks, findings | of |"
)
_ERRORS = ("error", "unreadable")
_ALL_ERRORS = (*_ERRORS, "lost")
_EVIDENCE = 3.0  # none of n seen: with 95 % certainty at most 3 / n

Summaries = Mapping[str, Summary]


def write(page: Path, faults: Sequence[Fault], runs: Sequence[Run], labels: Sequence[str]) -> None:
    """Put the runs of `labels` into the summaries beside `page`, and all of those into its table.

    `PAGE.json` holds the summaries, `PAGE.before.json` what to compare with. ValueError when the page has no marks.
    """
    text = page.read_text()
    head, found, rest = text.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"{page} has no {BEGIN} ... {END} to write the table between")
    summaries = summary.read(page.with_suffix(".json"))
    for fault in faults:
        if mine := [run for run in runs if run.fault == fault.name and run.commit in labels]:
            summaries[fault.name] = summary.of(mine)
    summary.write(page.with_suffix(".json"), summaries)
    before = summary.read(page.with_suffix(".before.json"))
    page.write_text(f"{head}{BEGIN}\n{table(list(FAULTS.values()), summaries, before)}{END}{tail}")


def table(faults: Sequence[Fault], now: Summaries, before: Summaries) -> str:
    """The table, then what is said of the faults; errors of `before` in brackets."""
    sizes: Counter[str] = Counter()
    for one in now.values():
        sizes[_source(one)] += one.runs
    sources = [source for source, _ in sizes.most_common()]
    lines = [_HEAD, "|" + "---|" * (_HEAD.count(" | ") + 1)]
    for fault in sorted(faults, key=lambda fault: fault.case):
        lines.append(_row(fault, now.get(fault.name), before.get(fault.name), sources))
    lines += ["", _total(list(now.values())), ""]
    lines += [f"{_mark(number)}: {source}." for number, source in enumerate(sources)]
    lines += ["", "Why some requests saw an error:", ""]
    harmed = [fault for fault in faults if fault.name in now and _count(now[fault.name], _ALL_ERRORS)]
    lines += [f"- `{fault.name}`: {fault.why or 'they need not'}." for fault in harmed] or ["- none did"]
    lines += ["", "Leaks, and what else ought not to be:", ""]
    lines += [line for fault in faults if fault.name in now for line in _findings(fault, now[fault.name])] or ["- none"]
    return "\n".join([*lines, ""])


def _findings(fault: Fault, one: Summary) -> list[str]:
    found = [f"- `{fault.name}`: {what} ({count} times)" for what, count in one.findings.items()]
    return found + [f"- `{fault.name}`: {error}" for error in one.never]


def _row(fault: Fault, now: Summary | None, before: Summary | None, sources: list[str]) -> str:
    name = f"| {fault.case} | `{fault.name}`: {fault.what} "
    if now is None:
        reason = f"cannot run here: {fault.obstacle()}" if fault.obstacle() else "not run"
        return f"{name}| {reason}{_before(before, _ALL_ERRORS)} |" + " |" * 11
    cells = [
        str(now.runs),
        str(now.streams),
        f"{_count(now, _ERRORS)}{_before(before, _ERRORS)}",
        f"{_count(now, ('lost',))}{_before(before, ('lost',))}",
        f"{', '.join(str(_count(now, (kind,))) for kind in NEVER)}{_before(before, NEVER)}",
        f"{sum(count for kind, count in now.probes.items() if kind != 'ok')} of {sum(now.probes.values())}",
        _median_and_most(now.outage_s),
        _median_and_most(now.whole_s),
        " / ".join(f"{1e3 * stall:.0f}" for stall in now.stalls_s) or "-",
        " -> ".join(f"{1e3 * itl:.0f}" for itl in now.itl_p99_s),
        f"{now.leaks}, {sum(now.findings.values()) - now.leaks}",
        _mark(sources.index(_source(now))),
    ]
    return name + "| " + " | ".join(cells) + " |"


def _total(summaries: Sequence[Summary]) -> str:
    runs, streams = sum(one.runs for one in summaries), sum(one.streams for one in summaries)
    if not streams:
        return "No runs yet."
    counts = ", ".join(f"{kind} {sum(_count(one, (kind,)) for one in summaries)}" for kind in NEVER)
    leaks = sum(one.leaks for one in summaries)
    return (
        f"In all {runs} runs with {streams} streams: {counts}, leaks {leaks}. What was seen 0 times happens, with 95 % "
        f"certainty, to at most {1e4 * _EVIDENCE / streams:.1f} of 10,000 streams."
    )


def _source(one: Summary) -> str:
    return f"{', '.join(one.commits)}, on {' and '.join(one.machines)}"


def _mark(number: int) -> str:
    return chr(ord("A") + number)


def _count(one: Summary, kinds: Sequence[str]) -> int:
    return sum(one.outcomes.get(kind, 0) for kind in kinds)


def _before(one: Summary | None, kinds: Sequence[str]) -> str:
    """What it was, as a share of the streams."""
    return f" (before: {_count(one, kinds)} of {one.streams})" if one is not None else ""


def _median_and_most(pair: Sequence[float]) -> str:
    return f"{pair[0]:.1f}, at most {pair[1]:.1f}" if pair else "-"
