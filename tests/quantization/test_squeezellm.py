"""SqueezeLLM's table form from a packer of our own, bit by bit, as its kernel reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import CheckpointError, UnsupportedError
from app.quantization.squeezellm import SqueezeLLM
from tests.loading.load_formats.formats import fill
from tests.quantization.checkpoints import HEADS, change, check_logits, check_weights, write
from tests.tiny_models import tiny_model

SCHEME = {"quant_method": "squeezellm", "wbits": 4}
DOWN = "model.layers.0.mlp.down_proj"


def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Sixteen quantiles of each row, and the nearest of them for each number."""
    quantiles = torch.linspace(0.01, 0.99, 16)
    table = torch.quantile(weight, quantiles, dim=1).t().contiguous()
    codes = (weight.unsqueeze(2) - table.unsqueeze(1)).abs().argmin(2)
    words = np.zeros((weight.shape[1] // 8, weight.shape[0]), np.uint32)
    for k in range(weight.shape[1]):
        words[k // 8] |= codes[:, k].numpy().astype(np.uint32) << np.uint32(4 * (k % 8))
    stored = {"qweight": torch.from_numpy(words.view(np.int32)), "lookup_table": table}
    return stored, table.gather(1, codes)


def made(directory: Path) -> Path:
    return write(tiny_model("llama", **HEADS), directory, pack, SCHEME)


def test_logits_and_shares_are_those_of_its_weights(tmp_path: Path) -> None:
    directory = made(tmp_path)
    check_logits(directory)
    check_weights(directory, tp=2)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (f"{DOWN}.lookup_table", None, r"lacks .*down_proj\.lookup_table"),
        (f"{DOWN}.lookup_table", lambda x: x[:, :8], r"lookup_table .* has shape \[64, 8\]"),
        (f"{DOWN}.qweight", lambda x: x[:3], r"qweight .* has shape \[3, 64\]"),
        (f"{DOWN}.qweight", lambda x: x.float(), r"qweight .* holds float32"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(
    name: str, edit: Callable[[torch.Tensor], torch.Tensor] | None, message: str, tmp_path: Path
) -> None:
    directory = made(tmp_path)
    change(directory, name, edit)
    with pytest.raises(CheckpointError, match=message):
        fill(directory)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    def with_rest(name: str, weight: torch.Tensor) -> tuple[Mapping[str, Any], torch.Tensor]:
        stored, values = pack(name, weight)
        return {**stored, "vals": torch.zeros(4)}, values

    directory = write(tiny_model("llama", **HEADS), tmp_path, with_rest, SCHEME)
    with pytest.raises(UnsupportedError, match=r"q_proj\.vals: sparse parts are not read"):
        fill(directory)
    with pytest.raises(UnsupportedError, match="wbits=3; only 4 are read"):
        SqueezeLLM.of_checkpoint({"quant_method": "squeezellm", "wbits": 3})
