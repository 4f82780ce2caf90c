"""The cells of a simulation as Markdown tables, and as one HTML page with plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from loadtest.chart import Line, line_chart
from loadtest.report import STYLE
from loadtest.simulation.cell import Result

_MORE_LINES = """
:root { --s4: #dc2626; --s5: #0891b2; --s6: #65a30d; --s7: #64748b; }
@media (prefers-color-scheme: dark) { :root { --s4: #f87171; --s5: #22d3ee; --s6: #a3e635; --s7: #94a3b8; } }
.line.s4 { stroke: var(--s4); } .line.s5 { stroke: var(--s5); } .line.s6 { stroke: var(--s6); }
.line.s7 { stroke: var(--s7); } .dot.s4 { fill: var(--s4); } .dot.s5 { fill: var(--s5); }
.dot.s6 { fill: var(--s6); } .dot.s7 { fill: var(--s7); } .dot.s0 { fill: var(--s0); } .dot.s1 { fill: var(--s1); }
"""
_HEAD = (
    *("replicas", "policy", "TTFT p50, s", "p90", "p99", "E2E p50, s", "p99", "hit rate", "of possible"),
    *("max/mean busy", "busy", "us/decision", "p99", "events us/req", "adapter loads/req", "reads/req"),
)


def markdown(results: Sequence[Result]) -> str:
    """One table for each trace and pressure."""
    parts = []
    for (trace, pressure), cells in _tables(results).items():
        parts.append(f"### {trace}, KV pressure {pressure:.0%}\n")
        parts.append("| " + " | ".join(_HEAD) + " |\n|" + "---|" * len(_HEAD))
        parts += ["| " + " | ".join(_row(cell)) + " |" for cell in cells]
        parts.append("")
    return "\n".join(parts)


def html_page(results: Sequence[Result], command: str) -> str:
    """Plots over fleet sizes (for one size only, none), then the tables."""
    parts = []
    for (trace, pressure), cells in _tables(results).items():
        parts.append(f"<h2>{escape(trace)}, KV pressure {pressure:.0%}</h2>")
        if len({cell.setting.num_replicas for cell in cells}) > 1:
            charts = [
                _chart("TTFT p90", "seconds", cells, lambda cell: cell.ttft_p90_s),
                _chart("TTFT p99", "seconds", cells, lambda cell: cell.ttft_p99_s),
                _chart("Hit rate", "cached / prompt tokens", cells, lambda cell: cell.hit_rate),
                _chart("Load imbalance", "max / mean busy time", cells, lambda cell: cell.imbalance),
            ]
            parts.append(f'<div class="charts">{"".join(charts)}</div>')
        head = "".join(f"<th>{escape(cell)}</th>" for cell in _HEAD)
        rows = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in _row(cell)) + "</tr>" for cell in cells)
        parts.append(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Routing, simulated</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{_MORE_LINES}</style></head><body>'
        f"<h1>Routing, simulated</h1><p>Command: <code>{escape(command)}</code></p>{''.join(parts)}</body></html>\n"
    )


def _tables(results: Sequence[Result]) -> dict[tuple[str, float], list[Result]]:
    tables: dict[tuple[str, float], list[Result]] = {}
    for result in results:
        tables.setdefault((result.setting.trace, result.setting.pressure), []).append(result)
    return tables


def _row(cell: Result) -> list[str]:
    return [
        *(f"{cell.setting.num_replicas:,}", cell.setting.policy),
        *(f"{value:.3f}" for value in (cell.ttft_p50_s, cell.ttft_p90_s, cell.ttft_p99_s)),
        *(f"{value:.2f}" for value in (cell.e2e_p50_s, cell.e2e_p99_s)),
        *(f"{cell.hit_rate:.1%}", f"{cell.hit_rate / cell.ideal_hit_rate:.1%}" if cell.ideal_hit_rate else "-"),
        *(f"{cell.imbalance:.2f}", f"{cell.mean_busy:.0%}"),
        *(f"{value:.0f}" for value in (cell.decision_us, cell.decision_p99_us, cell.events_us)),
        f"{cell.adapter_loads:.2f}",
        f"{cell.adapter_reads:.3f}",
    ]


def _chart(title: str, unit: str, cells: Sequence[Result], value: Callable[[Result], float]) -> str:
    lines = []
    for policy in dict.fromkeys(cell.setting.policy for cell in cells):
        points = [(float(c.setting.num_replicas), value(c)) for c in cells if c.setting.policy == policy]
        lines.append(Line(policy, sorted(points)))
    return line_chart(title, "replicas", unit, lines)
