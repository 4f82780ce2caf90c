"""Writes the tables of quantized formats into README.md and docs/quantization.md, between their marks.

    python -m tools.format_docs           # rewrite the tables
    python -m tools.format_docs --check   # exit 1 when one is stale

Which names there are, and what each can do, the methods themselves say; what each form costs is measured
(`python -m benchmarks.quantized_accuracy`, benchmarks/quantized_accuracy.json).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.backends import QUANT_METHODS
from app.errors import ConfigError
from app.quantization.base import QuantMethod
from app.quantize.settings import FORMS
from tools.markdown import table

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "quantized_accuracy.json"
FILES = {"formats": ROOT / "README.md", "accuracy": ROOT / "docs" / "quantization.md"}


def formats() -> list[str]:
    """Which formats there are."""
    methods = {name: QUANT_METHODS.load(name) for name in QUANT_METHODS if QUANT_METHODS.plugin(name) is None}
    kinds = {
        "checkpoints that load (`quant_method`)": [name for name, kind in methods.items() if _reads(kind)],
        "made while loading (`--quantization`)": [name for name, kind in methods.items() if _rounds(kind)],
        "written by `manta quantize` (`--to`)": list(FORMS),
    }
    head = ("[quantized weights](docs/quantization.md)", "")
    return table(head, ((kind, _codes(names)) for kind, names in kinds.items()))


def accuracy() -> list[str]:
    """What each form costs the built-in model."""
    rows = json.loads(FIGURES.read_text(encoding="utf-8"))["rows"]
    return table(("", "right answers", "perplexity", "KL, nats", "same most likely token", "MB"), _figures(rows))


def _figures(rows: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, row in rows.items():
        yield (
            name,
            f"{row['right']} of {row['questions']}",
            f"{row['perplexity']:.4f}",
            f"{row['kl_divergence']:.5f}",
            f"{row['same_top_token']:.1%}",
            f"{row['tensor_bytes'] / 1e6:.1f}",
        )


def _reads(kind: type[QuantMethod]) -> bool:
    return kind.of_checkpoint.__func__ is not QuantMethod.of_checkpoint.__func__  # type: ignore[attr-defined]


def _rounds(kind: type[QuantMethod]) -> bool:
    try:
        kind.while_loading()
    except ConfigError:
        return False
    return True


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written(name: str) -> str:
    """The whole file with the table `name` as it is now."""
    lines = {"formats": formats, "accuracy": accuracy}[name]()
    text = FILES[name].read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: python -m tools.format_docs -->", "<!-- end -->"
    made, count = re.subn(f"{re.escape(begin)}.*?{end}", lambda _: "\n".join([begin, *lines, end]), text, flags=re.S)
    assert count == 1, f"{FILES[name]} has no place for {name}"
    return made


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether a table is stale")
    check = parser.parse_args().check
    for name, file in FILES.items():
        if check and file.read_text(encoding="utf-8") != written(name):
            return 1
        if not check:
            file.write_text(written(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
