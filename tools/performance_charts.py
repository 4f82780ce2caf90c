"""The charts at the head of the performance page, of the figures in benchmarks/side_by_side.json.

python -m tools.performance_charts            (the same figures as a table in Markdown, with the floor's share of each)
python -m tools.performance_charts --write    (puts the table of README.md between its marks)
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.roofline import Floor
from loadtest.chart import Line, line_chart
from tools import markdown

ROOT = Path(__file__).resolve().parent.parent
FIGURES, README = ROOT / "benchmarks/side_by_side.json", ROOT / "README.md"
BEGIN, END = "<!-- speeds: python -m tools.performance_charts --write -->", "<!-- end -->"
README_BATCHES = (1, 32, 256)
# Colours of Material's own, which follow the reader's scheme.
STYLE = """<style>
.chart { width: 100%; max-width: 560px; height: auto; }
.chart text { fill: var(--md-typeset-color); font: 11px system-ui, sans-serif; }
.chart .title { font-size: 13px; font-weight: 600; }
.chart .end { text-anchor: end; } .chart .mid { text-anchor: middle; }
.chart .grid { stroke: var(--md-default-fg-color--lightest); } .chart .line { fill: none; stroke-width: 2; }
.line.s0 { stroke: #3f51b5; } .dot.s0 { fill: #3f51b5; } .line.s1 { stroke: #e08a00; } .dot.s1 { fill: #e08a00; }
.line.s2 { stroke: #777777; stroke-dasharray: 4 3; } .dot.s2 { fill: #777777; }
</style>"""


def charts(figures: dict[str, Any]) -> str:
    """HTML: milliseconds of a decode step by batch, a chart for each shape."""
    allowed = "what memory and tensor cores allow (floor: benchmarks/roofline.py)"
    about = f"Milliseconds of a decode step by the number of requests, and {allowed}; {figures['machine']}."
    parts = [STYLE, f"<p>{about}</p>"]
    for shape, row in figures["decode_ms"].items():
        lines = [Line(who, [(x, y) for x, y in row[who]]) for who in ("Manta", "vLLM")]
        lines.append(Line("floor", floor(row["shape"], figures["context"])))
        parts.append(line_chart(shape, "requests in the batch", "ms a step", lines))
        parts.append(f"<p>{shape}: {row['date']}.</p>")
    return "\n".join(parts)


def floor(shape: str, context: float) -> list[tuple[float, float]]:
    """Milliseconds that memory and tensor cores allow a step (benchmarks/roofline.py), by the number of requests."""
    bound = Floor.of(shape)
    return [(batch, 1e3 * bound.decode_s(batch, context)) for batch in (1, 8, 32, 64, 128, 256)]


def table(figures: dict[str, Any]) -> str:
    """Markdown: Manta's milliseconds of a step by batch, the floor's share of them, and vLLM's."""
    batches = (1, 8, 32, 128, 256)
    lines = ["| | " + " | ".join(map(str, batches)) + " |", "|---" * (len(batches) + 1) + "|"]
    for name, row in figures["decode_ms"].items():
        floors, ours, theirs = dict(floor(row["shape"], figures["context"])), dict(row["Manta"]), dict(row["vLLM"])
        cells = [
            f"{ours[batch]:.2f} (**{floors[batch] / ours[batch]:.2f}**), {theirs[batch]:.2f}" if batch in ours else "-"
            for batch in batches
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(results: str) -> str:
    """The performance page: charts between the heading and the text of benchmarks/RESULTS.md."""
    heading, _, rest = results.partition("\n")
    return f"{heading}\n\n{charts(json.loads(FIGURES.read_text(encoding='utf-8')))}\n{rest}"


def readme() -> str:
    """README.md with the figures as they are now."""
    rows = json.loads(FIGURES.read_text(encoding="utf-8"))["decode_ms"]
    head = ("", *(f"decode at {batch}" for batch in README_BATCHES), "prefill of 8,192")
    lines = markdown.table(head, ((name, *_beside(row)) for name, row in rows.items()))
    text = README.read_text(encoding="utf-8")
    made, count = re.subn(f"{re.escape(BEGIN)}.*?{END}", lambda _: "\n".join([BEGIN, *lines, END]), text, flags=re.S)
    assert count == 1, "README.md has no place for the figures"
    return made


def _beside(row: dict[str, Any]) -> list[str]:
    """Manta's milliseconds / vLLM's, the latter in bold where they are fewer."""
    ours, theirs, prefill = dict(row["Manta"]), dict(row["vLLM"]), row["prefill_8192_ms"]
    pairs = [(ours[batch], theirs[batch]) for batch in README_BATCHES] + [(prefill["Manta"], prefill["vLLM"])]
    cells = [(_three_digits(a), _three_digits(b)) for a, b in pairs]
    return [f"{a} / **{b}**" if float(b) < float(a) else f"{a} / {b}" for a, b in cells]


def _three_digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(readme(), encoding="utf-8")
    else:
        print(table(json.loads(FIGURES.read_text(encoding="utf-8"))))
