"""GGUF files of Kimi-Linear against transformers with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.gguf.description import describe
from app.errors import CheckpointError
from tests.checkpoints.gguf.test_description import expect_logits
from tests.gguf_models import write_gguf
from tests.models.families.state_variants import STORABLE
from tests.tiny_models import tiny_model


def write(file: Path, metadata: dict[str, Any] | None = None) -> Any:
    family, sizes = STORABLE["kimi_linear"]
    return write_gguf(tiny_model(family, **sizes), file, "kimi-linear", lambda _: "Q8_0", metadata)


def test_logits_are_those_of_its_weights(tmp_path: Path) -> None:
    expect_logits(tmp_path / "model.gguf", write(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"{arch}.kda.head_dim": None}, r"the metadata lack kimi-linear\.kda\.head_dim"),
        ({"{arch}.attention.head_count_kv": [1, 0]}, "head_count_kv has 2 entries for 5 layers"),
    ],
)
def test_what_does_not_go_together_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", metadata)
    with pytest.raises(CheckpointError, match=message):
        describe(tmp_path / "model.gguf")
