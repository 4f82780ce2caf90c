"""The levels of a sweep as one HTML page that needs nothing beside it: plots, a table, details of every level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from loadtest.chart import Line, line_chart
from loadtest.summary import LatencySummary, LevelSummary

STYLE = """
:root { color-scheme: light dark; --fg: #1c2430; --dim: #667085; --bg: #fff; --line: #e3e6ea; --bad: #b42318;
  --s0: #2563eb; --s1: #d97706; --s2: #9333ea; --s3: #059669; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e9ee; --dim: #98a2b3; --bg: #14181f; --line: #2c333d;
  --bad: #f97066; --s0: #6ea0ff; --s1: #fbbf24; --s2: #c084fc; --s3: #34d399; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 2rem auto;
  max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; color: var(--dim); } code { font-size: .9em; overflow-wrap: anywhere; }
.bad { color: var(--bad); }
.charts { display: grid; margin: .8rem 0; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.chart { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 8px; }
.chart text { fill: var(--fg); font: 11px system-ui, sans-serif; } .chart .title { font-size: 13px; font-weight: 600; }
.chart .tick { fill: var(--dim); } .end { text-anchor: end; } .mid { text-anchor: middle; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2; } .dot { stroke: none; }
.line.s0 { stroke: var(--s0); } .line.s1 { stroke: var(--s1); } .line.s2 { stroke: var(--s2); }
.line.s3 { stroke: var(--s3); } .dot.s0 { fill: var(--s0); } .dot.s1 { fill: var(--s1); }
.dot.s2 { fill: var(--s2); } .dot.s3 { fill: var(--s3); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--dim); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
details { margin: .6rem 0; } summary { cursor: pointer; }
"""


@dataclass(slots=True, frozen=True)
class Level:
    """One step of a sweep: its load (users or requests per second) and what came of it."""

    load: float
    summary: LevelSummary
    client_cores: float  # CPU seconds per second that the load generator used


@dataclass(slots=True, frozen=True)
class SweepInfo:
    """What stands above the plots."""

    title: str
    load_name: str  # "users" or "requests/s offered"
    goals: str
    facts: dict[str, str]  # what was run, where and when


def html_report(info: SweepInfo, levels: Sequence[Level]) -> str:
    """The page."""
    facts = "".join(f"<p>{escape(name)}: <code>{escape(value)}</code></p>" for name, value in info.facts.items())
    failed = sum(level.summary.num_failed for level in levels)
    verdict = f'<p class="bad">{failed} requests failed</p>' if failed else "<p>No request failed.</p>"
    details = "".join(_level_details(info, level, is_open=len(levels) == 1) for level in levels)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info.title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(info.title)}</h1>{facts}{verdict}"
        f"<h2>Levels</h2>{_level_table(info, levels)}{_notes(info)}"
        + (f'<div class="charts">{"".join(_charts(info, levels))}</div>' if len(levels) > 1 else "")
        + f"<h2>Every level</h2>{details}</body></html>\n"
    )


def _charts(info: SweepInfo, levels: Sequence[Level]) -> list[str]:
    def by_load(name: str, value: Callable[[LevelSummary], float]) -> Line:
        return Line(name, [(level.load, value(level.summary)) for level in levels])

    def percentiles(metric: str) -> list[Line]:
        return [
            by_load("p50", lambda summary: summary.latency[metric].p50_ms),
            by_load("p90", lambda summary: summary.latency[metric].p90_ms),
            by_load("p99", lambda summary: summary.latency[metric].p99_ms),
        ]

    def against_throughput(name: str, value: Callable[[LatencySummary], float]) -> Line:
        points = [(level.summary.output_tokens_per_s, value(level.summary.latency["e2e"])) for level in levels]
        return Line(name, points, [f"{level.load:g}" for level in levels] if name == "p50" else ())

    return [
        line_chart(
            f"Latency against throughput (labels: {info.load_name})",
            "output tokens/s",
            "E2E, ms",
            [against_throughput("p50", lambda e2e: e2e.p50_ms), against_throughput("p99", lambda e2e: e2e.p99_ms)],
        ),
        line_chart("Time to first token", info.load_name, "TTFT, ms", percentiles("ttft")),
        line_chart("Time between chunks", info.load_name, "ITL, ms", percentiles("itl")),
        line_chart(
            "Goodput",
            info.load_name,
            "requests/s",
            [
                by_load("completed", lambda summary: summary.requests_per_s),
                by_load("good", lambda summary: summary.goodput_per_s),
            ],
        ),
    ]


def _level_table(info: SweepInfo, levels: Sequence[Level]) -> str:
    head = [
        info.load_name, "requests", "failed", "req/s", "good req/s", "out tok/s", "in flight",
        "TTFT p50", "p90", "p99", "ITL p50", "p99", "TPOT p50", "p99", "E2E p50", "p99", "client cores",
    ]  # fmt: skip
    rows = []
    for level in levels:
        summary, latency = level.summary, level.summary.latency
        ttft, itl, tpot, e2e = (latency[metric] for metric in ("ttft", "itl", "tpot", "e2e"))
        rows.append(
            [f"{level.load:g}", f"{summary.num_requests:,}", f"{summary.num_failed:,}"]
            + [f"{summary.requests_per_s:.2f}", f"{summary.goodput_per_s:.2f}", f"{summary.output_tokens_per_s:,.0f}"]
            + [f"{summary.mean_running:.1f}"]
            + [f"{value:,.1f}" for value in (ttft.p50_ms, ttft.p90_ms, ttft.p99_ms, itl.p50_ms, itl.p99_ms)]
            + [f"{value:,.1f}" for value in (tpot.p50_ms, tpot.p99_ms, e2e.p50_ms, e2e.p99_ms)]
            + [f"{level.client_cores:.2f}"]
        )
    return _table(head, rows)


def _notes(info: SweepInfo) -> str:
    return (
        "<p>Times in milliseconds, by vLLM's definitions; TTFT ends with the first chunk that carries text. "
        f"A good request meets: {escape(info.goals)}.</p>"
    )


def _level_details(info: SweepInfo, level: Level, is_open: bool) -> str:
    summary = level.summary
    rows = [
        [kind, f"{latencies['e2e'].num_samples:,}"]
        + [f"{latencies[m].p50_ms:,.1f} / {latencies[m].p99_ms:,.1f}" for m in ("ttft", "itl", "tpot", "e2e")]
        for kind, latencies in {**summary.by_kind, "all": summary.latency}.items()
    ]
    head = ["users", "answers", "TTFT p50 / p99", "ITL p50 / p99", "TPOT p50 / p99", "E2E p50 / p99"]
    errors = "".join(f'<p class="bad">{n} × {escape(message)}</p>' for message, n in summary.errors.items())
    share = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    tokens = f"{summary.prompt_tokens:,} prompt tokens ({share:.0%} cached), {summary.output_tokens:,} output tokens"
    return (
        f"<details{' open' if is_open else ''}><summary>{level.load:g} {escape(info.load_name)}</summary>"
        f'{_table(head, rows)}<p>{tokens}</p>{errors}<div class="charts">{"".join(_timelines(summary))}</div></details>'
    )


def _timelines(summary: LevelSummary) -> list[str]:
    points = summary.timeline
    rate = Line("tokens/s", [(point.begin_s, point.output_tokens_per_s) for point in points])
    begun = [point for point in points if point.num_begun]
    return [
        line_chart("Throughput over time", "seconds", "output tokens/s", [rate]),
        line_chart(
            "TTFT over time",
            "seconds",
            "ms",
            [
                Line("p50", [(point.begin_s, point.ttft_p50_ms) for point in begun]),
                Line("p99", [(point.begin_s, point.ttft_p99_ms) for point in begun]),
            ],
        ),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
