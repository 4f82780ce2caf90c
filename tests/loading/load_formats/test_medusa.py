"""The heads' own file is found and read; what holds more than tensors is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.checkpoints.tensors.reader import Reader
from app.errors import CheckpointError
from app.loading.load_formats.medusa import MedusaFile, has_medusa_file

TENSORS = {"0.0.linear.weight": torch.eye(3), "0.1.weight": torch.ones(5, 3)}


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_both_forms(tmp_path: Path, name: str) -> None:
    assert not has_medusa_file(tmp_path)
    (torch.save if name.endswith(".pt") else save_file)(TENSORS, tmp_path / name)
    assert has_medusa_file(tmp_path)
    found = MedusaFile().tensors(tmp_path, Reader())
    assert {key: tensor.whole().tolist() for key, tensor in found.items()} == {
        key: tensor.tolist() for key, tensor in TENSORS.items()
    }


def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": [1, 2]}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"0\.0\.linear\.weight is a list, not a tensor"):
        MedusaFile().tensors(tmp_path, Reader())
