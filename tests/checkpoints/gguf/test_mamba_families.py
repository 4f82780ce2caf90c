"""GGUF files of families with Mamba 1 against transformers with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.gguf.description import describe
from app.errors import CheckpointError, MantaError, UnsupportedError
from tests.checkpoints.gguf.test_description import expect_logits
from tests.gguf_models import write_gguf
from tests.models.families.state_variants import STORABLE
from tests.tiny_models import tiny_model

# name of sizes: GGUF's architecture
FAMILIES = {"mamba": "mamba", "mamba-tied": "mamba", "falcon_mamba": "mamba", "jamba": "jamba", "jamba-dense": "jamba"}


def write(file: Path, family: str, metadata: dict[str, Any] | None = None) -> Any:
    own, sizes = STORABLE[family]
    return write_gguf(tiny_model(own, **sizes), file, FAMILIES[family], lambda _: "Q8_0", metadata)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_its_weights(family: str, tmp_path: Path) -> None:
    expect_logits(tmp_path / "model.gguf", write(tmp_path / "model.gguf", family))


@pytest.mark.parametrize(
    ("family", "metadata", "error", "message"),
    [
        ("mamba", {"{arch}.ssm.state_size": 0}, CheckpointError, r"mamba\.ssm\.state_size is 0, not a size"),
        ("jamba", {"{arch}.ssm.inner_size": 100}, CheckpointError, r"ssm\.inner_size is 100, no multiple of 64"),
        (
            *("jamba", {"{arch}.attention.head_count_kv": [1, 1, 0, 1]}, UnsupportedError),
            r"layers \[0, 1, 3\] are no attn_layer_period and attn_layer_offset",
        ),
    ],
)
def test_what_does_not_go_together_is_named(
    family: str, metadata: dict[str, Any], error: type[MantaError], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", family, metadata)
    with pytest.raises(error, match=message):
        describe(tmp_path / "model.gguf")
