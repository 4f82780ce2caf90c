"""GGUF files of families with Mamba 2 against transformers with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.gguf.description import describe
from app.errors import CheckpointError
from tests.checkpoints.gguf.test_description import expect_logits, logits_of
from tests.gguf_models import write_gguf
from tests.models.families.state_variants import STORABLE
from tests.tiny_models import tiny_model

# name of sizes: GGUF's architecture
FAMILIES = {
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "nemotron_h-experts": "nemotron_h_moe",
    "nemotron_h-latent": "nemotron_h_moe",
    "granite_hybrid": "granitehybrid",
    "granite_hybrid-dense": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "falcon_h1-norms": "falcon-h1",
}


def write(
    file: Path, family: str = "nemotron_h", metadata: dict[str, Any] | None = None, kind: str = "Q8_0", **changes: Any
) -> Any:
    own, sizes = STORABLE[family]
    source = tiny_model(own, **{**sizes, **changes})
    return write_gguf(source, file, FAMILIES[family], lambda _: kind, metadata)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_its_weights(family: str, tmp_path: Path) -> None:
    expect_logits(tmp_path / "model.gguf", write(tmp_path / "model.gguf", family))


def test_groups_that_are_no_whole_blocks(tmp_path: Path) -> None:
    """Of plain numbers."""
    sizes = {"mamba_num_heads": 6, "mamba_head_dim": 24}
    expect_logits(tmp_path / "model.gguf", write(tmp_path / "model.gguf", kind="F32", **sizes))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """A file counts them, and they both attend and have experts."""
    file, heads, widths = tmp_path / "model.gguf", [0, 0, 1, 0, 1], [0, 64, 0, 0, 64]
    metadata = {"nextn_predict_layers": 1, "attention.head_count_kv": heads, "feed_forward_length": widths}
    judge = write(file, "nemotron_h-experts", {f"{{arch}}.{key}": value for key, value in metadata.items()})
    judge.model.layers = judge.model.layers[:4]
    expect_logits(file, judge)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"{arch}.feed_forward_length": [0, 96]}, "feed_forward_length has 2 entries for 5 layers"),
        ({"{arch}.feed_forward_length": [0, 96, 96, 0, 96]}, "layer 2 both attends and feeds forward"),
        ({"{arch}.ssm.inner_size": 100}, r"ssm\.inner_size is 100, no 8 heads"),
        ({"{arch}.ssm.time_step_rank": None}, r"the metadata lack nemotron_h\.ssm\.time_step_rank"),
    ],
)
def test_what_does_not_go_together_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        describe(tmp_path / "model.gguf")


def test_groups_that_a_projection_does_not_have_are_named(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", metadata={"{arch}.ssm.group_count": 4})
    with pytest.raises(CheckpointError, match=r"in_proj\.weight in .* has shape \[328, 2, 34\]"):
        logits_of(tmp_path / "model.gguf")


def test_more_heads_than_the_hidden_size_are_named(tmp_path: Path) -> None:
    metadata = dict.fromkeys(("{arch}.attention.key_length", "{arch}.attention.value_length", "{arch}.attention.scale"))
    write(tmp_path / "model.gguf", "bamba", {**metadata, "{arch}.attention.head_count": 128})
    with pytest.raises(CheckpointError, match=r"attention\.head_count is more than embedding_length"):
        describe(tmp_path / "model.gguf")
