"""The tables of docs/quantization.md name every method that there is, and no other."""

from __future__ import annotations

import re

from app.backends import QUANT_METHODS
from app.checkpoints.gguf.architectures import ARCHITECTURES
from app.checkpoints.gguf.blocks import BLOCK_TYPES
from app.quantize.settings import FORMS
from tests.docs.pages import DOCS
from tools import format_docs

PAGE = (DOCS / "quantization.md").read_text()


def test_every_method_has_a_row() -> None:
    named = _first_cells()
    assert set(QUANT_METHODS) <= named
    assert named - {"quantization", "quant_method", "fp8"} <= set(QUANT_METHODS)


def _first_cells() -> set[str]:
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([\w/-]+)`", cell)}


def test_types_and_families_of_gguf_are_all_of_them() -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `gguf`")]
    names = set(re.findall(r"\b(?:I?Q\d_\w+|B?F(?:16|32)|MXFP4)\b", row))
    assert names == BLOCK_TYPES.keys()
    assert ARCHITECTURES.keys() <= set(re.findall(r"[a-z][a-z\d_-]*", row))


def test_tables_of_formats_are_as_the_tool_writes_them() -> None:
    for name, file in format_docs.FILES.items():
        assert file.read_text() == format_docs.written(name), "python -m tools.format_docs"


def test_every_form_has_a_figure() -> None:
    figures = "\n".join(format_docs.accuracy())
    for form in FORMS:
        assert f"| online {form} | " in figures
        assert f"| checkpoint {form} | " in figures
