"""Views of stored tensors: every part of one is the part of what the view stands for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed, text_name
from app.checkpoints.tensors.reader import DirectReader
from app.checkpoints.tensors.tensor_view import computed, pairs_to_halves, rows, split_rows, transposed
from app.errors import CheckpointError
from app.loading.load_formats.safetensors import open_files
from app.models.grouped_heads import part_of_heads
from tests.tiny_models import tiny_model


@pytest.fixture
def stored() -> StoredTensor:
    files = open_files([tiny_model() / "model.safetensors"], DirectReader())
    return files["model.layers.0.mlp.up_proj.weight"]


def check(view: StoredTensor, expected: torch.Tensor) -> None:
    assert view.shape == tuple(expected.shape)
    assert torch.equal(view.whole(), expected)
    for dim, size in enumerate(view.shape):
        part = expected.narrow(dim, size // 3, size // 2)
        assert torch.equal(view.narrow(dim, size // 3, size // 2), part)
        target = torch.full_like(part, float("nan"))
        view.read_into(target, dim, size // 3)
        assert torch.equal(target, part)


def test_views(stored: StoredTensor) -> None:
    whole = stored.whole()
    check(rows(stored, 10, 30), whole[10:40])
    check(transposed(stored), whole.t())
    check(rows(transposed(stored), 5, 20), whole.t()[5:25])
    check(computed(stored, lambda x: x.flip(0)), whole.flip(0))
    assert (stored.name, Path(stored.file).name) == (rows(stored, 0, 1).name, "model.safetensors")


def test_fused_tensors_are_split_and_common_ones_given_to_all(stored: StoredTensor) -> None:
    parts = dict(split_rows(stored, {"a": 12, "b": 100}))
    check(parts["a"], stored.whole()[:12])
    check(parts["b"], stored.whole()[12:])
    assert all(part is stored for _, part in split_rows(stored, {"a": 3, "b": 4}))


def test_pairs_become_halves(stored: StoredTensor) -> None:
    """Head 16 wide, of which 8 turn: dimensions 0 2 4 6 1 3 5 7, then the rest."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)])
    check(pairs_to_halves(stored, 16, 8), stored.whole().view(7, 16, 64)[:, order].reshape(112, 64))
    with pytest.raises(CheckpointError, match=rf"{re.escape(stored.name)} has \d+ rows, no heads of 9"):
        pairs_to_halves(stored, 9, 2).whole()
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(stored.name)} has shape .*, whose numbers do not fill \[9, -1\]"
    ):
        stored.reshaped(9, -1)
    with pytest.raises(CheckpointError, match="112 rows of queries, keys and values are no groups of 3 heads of 16"):
        part_of_heads(stored.whole(), 16, 3, 0, 1)


def test_names() -> None:
    assert renamed("h.3.ln_1.weight", [(r"^h\.", "layers."), (r"\.ln_1\.", ".norm.")]) == "layers.3.norm.weight"
    assert text_name("vision_tower.encoder.weight") is None
    assert text_name("model.language_model.norm.weight") == "model.norm.weight"
    assert text_name("language_model.lm_head.weight") == "lm_head.weight"
