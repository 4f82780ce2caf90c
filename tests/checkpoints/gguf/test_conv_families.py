"""GGUF files of LFM2 against transformers with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.gguf.description import describe
from app.errors import CheckpointError, UnsupportedError
from tests.checkpoints.gguf.test_description import expect_logits
from tests.gguf_models import write_gguf
from tests.models.families.state_variants import STORABLE
from tests.tiny_models import tiny_model

FAMILIES = {"lfm2": "lfm2", "lfm2_moe": "lfm2moe"}  # name of sizes: GGUF's architecture


def write(family: str, file: Path, metadata: dict[str, Any] | None = None) -> Any:
    kind, sizes = STORABLE[family]
    source = tiny_model(kind, **sizes)
    return write_gguf(
        source, file, FAMILIES[family], lambda name: "F32" if "ffn_gate_inp" in name else "Q8_0", metadata
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_its_weights(family: str, tmp_path: Path) -> None:
    expect_logits(tmp_path / "model.gguf", write(family, tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"{arch}.attention.head_count_kv": [0, 2]}, CheckpointError, "head_count_kv has 2 entries for 3 layers"),
        ({"{arch}.attention.head_count_kv": [1, 2, 0]}, UnsupportedError, "head_count_kv differs from layer to layer"),
        ({"{arch}.shortconv.l_cache": None}, CheckpointError, r"the metadata lack lfm2\.shortconv\.l_cache"),
    ],
)
def test_what_does_not_go_together_is_named(
    metadata: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write("lfm2", tmp_path / "model.gguf", metadata)
    with pytest.raises(error, match=message):
        describe(tmp_path / "model.gguf")
