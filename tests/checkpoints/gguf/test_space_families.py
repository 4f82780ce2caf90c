"""GGUF files of Nemotron-H against transformers with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.gguf.description import describe
from app.errors import CheckpointError
from tests.checkpoints.gguf.test_description import expect_logits
from tests.gguf_models import write_gguf
from tests.models.families.state_variants import NEMOTRON
from tests.tiny_models import tiny_model

SIZES = {
    **NEMOTRON, "mamba_num_heads": 8, "mamba_head_dim": 16, "intermediate_size": 96, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    describe.cache_clear()


def write(file: Path, metadata: dict[str, Any] | None = None, kind: str = "Q8_0", **changes: Any) -> Any:
    source = tiny_model("nemotron_h", **{**SIZES, **changes})
    return write_gguf(source, file, "nemotron_h", lambda _: kind, metadata)


@pytest.mark.parametrize(("kind", "changes"), [("Q8_0", {}), ("F32", {"mamba_num_heads": 6, "mamba_head_dim": 24})])
def test_logits_are_those_of_its_weights(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    expect_logits(tmp_path / "model.gguf", write(tmp_path / "model.gguf", kind=kind, **changes))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"{arch}.feed_forward_length": [0, 96]}, "feed_forward_length has 2 entries for 5 layers"),
        ({"{arch}.feed_forward_length": [0, 96, 96, 0, 96]}, "layer 2 both attends and feeds forward"),
        ({"{arch}.ssm.inner_size": 100}, r"ssm\.inner_size is 100, no 8 heads"),
        ({"{arch}.ssm.group_count": 3}, r"in_proj\.weight has shape \[.*\], not 360 rows"),
    ],
)
def test_what_does_not_go_together_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", metadata)
    with pytest.raises(CheckpointError, match=message):
        describe(tmp_path / "model.gguf")
