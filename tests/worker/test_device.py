"""The compute type that a worker takes, and what its start says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.worker.device import select_dtype

CPU = torch.device("cpu")


def info(folder: Path, **config: Any) -> ModelInfo:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **config}))
    return ModelInfo.from_directory(folder)


def test_a_cpu_takes_float32_and_says_where_another_type_is_faster(tmp_path: Path) -> None:
    assert select_dtype("auto", CPU, info(tmp_path)) == (torch.float32, "dtype: float32 (CPU)")
    dtype, note = select_dtype("auto", CPU, info(tmp_path, quantization_config={"quant_method": "gptq"}))
    assert dtype == torch.float32
    assert "--dtype bfloat16" in note


@pytest.mark.parametrize("scheme", [{}, {"quantization_config": {"quant_method": "gptq"}}])
def test_a_given_type_is_taken(scheme: dict[str, Any], tmp_path: Path) -> None:
    assert select_dtype("bfloat16", CPU, info(tmp_path, **scheme)) == (
        torch.bfloat16,
        "dtype: bfloat16 (as configured)",
    )
