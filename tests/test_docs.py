"""The page of models names every architecture that runs: what the tables of the code say, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from app.models import MODELS, POOLING_MODELS

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "models.md").read_text()
OWN = PAGE.partition("## Through transformers")[0]
KINDS = re.compile(r"(?:For[A-Z]\w*|Model|LMHeadModel)$")
# Classifiers and embedding models of decoders are named as a class.
DECODERS = {KINDS.sub("", name) for name in MODELS} | {"Gemma3Text"}


def named() -> set[str]:
    """Architectures in the tables; `...ForX` is that of each name before it in its cell."""
    found = set()
    for cell in re.findall(r"\|([^|\n]*`[A-Z]\w+`[^|\n]*)\|", OWN):
        names = re.findall(r"`([A-Z]\w+)`", cell)
        found.update(names)
        found.update(KINDS.sub("", name) + kind for name in names for kind in re.findall(r"`\.\.\.(\w+)`", cell))
    return found


def test_every_architecture_is_on_the_page() -> None:
    encoders = {name for name in POOLING_MODELS if KINDS.sub("", name) not in DECODERS}
    assert encoders, "the table of pooling models holds encoders"
    assert (set(MODELS) | encoders) - named() == set()


def test_what_the_page_names_is_there() -> None:
    assert {name for name in named() if KINDS.search(name)} - {*MODELS, *POOLING_MODELS} == set()
