"""Sharded state: what is written beside the weights, and what is refused; what ranks hold: models/load_formats/."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.cli import main
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.layers.attention import Attention
from app.worker.save_sharded import save_sharded
from tests.loading.load_formats.formats import assert_same, contexts, fill
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model

SHAPE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_the_command_saves_what_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tiny_model("llama", **SHAPE), tmp_path / "out"
    assert main(["save-sharded", str(source), str(output), "--tensor-parallel-size", "2"]) == 0
    assert f"manta serve {output} --tensor-parallel-size 2" in capsys.readouterr().out
    assert (output / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert main(["save-sharded", str(source), str(output)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_slots_of_experts_that_move_are_saved_as_they_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a start that would have others is refused by the field's name."""
    kind, changes = EXPERT_VARIANTS["qwen3_moe"]
    source, output = tiny_model(kind, **changes), tmp_path / "out"
    whole = {"tp": 2, "enable_expert_parallel": True}
    moving = {**whole, "enable_eplb": True, "num_redundant_experts": 2}
    options = ["--tensor-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb"]
    assert main(["save-sharded", str(source), str(output), *options, "--num-redundant-experts", "2"]) == 0
    assert " ".join((*options, "--num-redundant-experts 2")) in capsys.readouterr().out
    for ctx in contexts(source, **moving):
        assert_same(fill(output, ctx=ctx), fill(source, ctx=ctx))
    for other, field in ((whole, "enable_eplb"), ({**moving, "num_redundant_experts": 4}, "num_redundant_experts")):
        with pytest.raises(ConfigError, match="with EPLB and num_redundant_experts=2") as error:
            fill(output, ctx=contexts(source, **other)[1])
        assert error.value.param == field


def test_scales_of_a_quantized_cache_come_along(tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("llama", **SHAPE), tmp_path / "source"))
    scales = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor([0.5, 2.0]) + layer for layer in range(2)}
    save_file({**load_file(source / "model.safetensors"), **scales}, source / "model.safetensors")
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    save_sharded(EngineConfig(model=str(source), **sizes), tmp_path / "out")
    for rank, ctx in enumerate(contexts(source, 2, 2)):
        model = fill(tmp_path / "out", ctx=replace(ctx, kv_dtype=torch.float8_e4m3fn))
        (layer,) = (module for module in model.modules() if isinstance(module, Attention))
        assert layer.kv_scales is not None
        assert layer.kv_scales[0].tolist() == [(0.5, 2.0)[rank % 2] + rank // 2]
