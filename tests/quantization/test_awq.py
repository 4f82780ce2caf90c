"""Checkpoints of AWQ, packed here as AutoAWQ describes its gemm form, against transformers with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import CheckpointError, UnsupportedError
from app.quantization import select_quantization
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver

SCHEME: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


def words(codes: np.ndarray) -> torch.Tensor:
    """[M, N] below 16 -> int32 [M, N / 8]."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE):
        packed |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(packed.view(np.int32))


def awq(group: int, plain_module: str = "-") -> Pack:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        if plain_module in name:
            return None
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        groups = weight.view(outputs, -1, size)
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).half()
        zero = (-low / scale).round().clamp(0, 15)
        codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
        plain = ((codes - zero[..., None]) * scale[..., None].float()).view(outputs, inputs)
        return {
            "qweight": words(codes.view(outputs, inputs).t().numpy().astype(np.uint8)),
            "qzeros": words(zero.t().numpy().astype(np.uint8)),
            "scales": scale.t(),
        }, plain

    return pack


@pytest.mark.parametrize("group", [16, -1])
def test_logits_equal_transformers(tmp_path: Path, group: int) -> None:
    source = tiny_model("llama", intermediate_size=80, **HEADS)  # the second rank's inputs begin within a group
    scheme = {**SCHEME, "group_size": group, "modules_to_not_convert": ["layers.1.mlp.gate_proj"]}
    directory = write(source, tmp_path, awq(group, "layers.1.mlp.gate"), scheme)
    check_logits(directory)
    check_weights(directory, tp=2)


def test_fused_projections_of_the_checkpoint(tmp_path: Path) -> None:
    source = tiny_model("phi3", pad_token_id=0)
    check_logits(write(source, tmp_path, awq(16), SCHEME))


@pytest.mark.parametrize(
    ("leaf", "make", "message"),
    [
        ("scales", None, "lacks model.layers.0.mlp.down_proj.scales"),
        ("qzeros", lambda x: x[1:], r"down_proj.qzeros .* \[6, 8\], the model expects \[7, 8\]"),
        ("qweight", lambda x: x.t(), r"down_proj.qweight .* \[8, 112\], the model expects \[112, 8\]"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, leaf: str, make: Any, message: str) -> None:
    directory = write(tiny_model("llama"), tmp_path, awq(16), SCHEME)
    change(directory, f"model.layers.0.mlp.down_proj.{leaf}", make)
    with pytest.raises(CheckpointError, match=message):
        Driver(str(directory), num_blocks=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, "version=gemv; take a checkpoint of version gemm"),
        ({"version": "gemv_fast"}, "version=gemv_fast"),
        ({"bits": 8}, "bits=8"),
        ({"zero_point": False}, "zero_point=False"),
        ({"group_size": 0}, "group_size=0"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        select_quantization(None, {**SCHEME, **changes}, torch.device("cpu"), torch.float32)
