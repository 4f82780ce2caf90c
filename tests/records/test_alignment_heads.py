"""Heads that follow the sound, from a model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.records.alignment_heads import AlignmentHeads


def info(heads: Any, **config: Any) -> ModelInfo:
    sizes = {"model_type": "whisper", "decoder_layers": 4, "decoder_attention_heads": 6}
    generation = {} if heads is None else {"alignment_heads": heads}
    return ModelInfo(Path("model"), {**sizes, **config}, generation)


def test_heads() -> None:
    assert AlignmentHeads.of(info([[3, 5], [1, 0], [3, 5]])) == AlignmentHeads(((1, 0), (3, 5)), 7)
    assert AlignmentHeads.of(info([[0, 0]], median_filter_width=3)).median_width == 3


@pytest.mark.parametrize("heads", [None, [], [[4, 0]], [[0, 6], [0, 1]]])
def test_none_is_known(heads: Any) -> None:
    """None are named, or some that the model does not have: a distilled one's are its teacher's."""
    assert AlignmentHeads.of(info(heads)).heads == ()


@pytest.mark.parametrize(
    ("heads", "config", "said"),
    [
        ([[0]], {}, "alignment_heads"),
        ([[0, -1]], {}, "alignment_heads"),
        ([[0, 1]] * 2000, {}, "alignment_heads"),
        ("all", {}, "alignment_heads"),
        ([[0, 1]], {"median_filter_width": 4}, "median_filter_width"),
        ([[0, 1]], {"median_filter_width": 1 << 20}, "median_filter_width"),
        ([[0, 1]], {"median_filter_width": "7"}, "median_filter_width"),
    ],
)
def test_what_is_unusable(heads: Any, config: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        AlignmentHeads.of(info(heads, **config))
