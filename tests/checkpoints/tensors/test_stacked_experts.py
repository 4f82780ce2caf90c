"""The parts of experts that a checkpoint holds in one tensor are those that slices of it give."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.reader import DirectReader
from app.checkpoints.tensors.stacked_experts import DOWN, HALVES, IN_TURN, flattened_cuts, transposed_cuts, unstacked
from app.loading.load_formats.safetensors import open_files


def stored(folder: Path, tensor: torch.Tensor) -> StoredTensor:
    save_file({"experts": tensor}, str(folder / "model.safetensors"))
    return open_files([folder / "model.safetensors"], DirectReader())["experts"]


def test_gate_above_up_and_in_turn(tmp_path: Path) -> None:
    whole = torch.randn(3, 8, 5)  # [E, 2 I, C]
    tensor = stored(tmp_path, whole)
    for cuts, gate, up in ((HALVES, whole[:, :4], whole[:, 4:]), (IN_TURN, whole[:, 0::2], whole[:, 1::2])):
        parts = dict(unstacked("mlp.experts", "weight", tensor, cuts))
        assert len(parts) == 6
        for expert in range(3):
            assert torch.equal(parts[f"mlp.experts.{expert}.gate_proj.weight"].whole(), gate[expert])
            assert torch.equal(parts[f"mlp.experts.{expert}.up_proj.weight"].whole(), up[expert])


def test_matrices_the_other_way_round_and_blocks_of_bytes(tmp_path: Path) -> None:
    whole = torch.randn(2, 5, 6)
    turned = dict(unstacked("e", "weight", stored(tmp_path, whole), transposed_cuts(DOWN)))
    assert torch.equal(turned["e.1.down_proj.weight"].whole(), whole[1].t())
    blocks = torch.arange(2 * 4 * 3 * 2, dtype=torch.uint8).reshape(2, 4, 3, 2)
    flat = dict(unstacked("e", "blocks", stored(tmp_path, blocks), flattened_cuts(HALVES)))
    assert torch.equal(flat["e.0.up_proj.blocks"].whole(), blocks[0].reshape(4, 6)[2:])
