"""Matrices of all heads, taken apart as NumPy takes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.reader import DirectReader
from app.loading.load_formats.safetensors import open_files
from app.models.decoder_settings import DecoderSettings
from app.models.grouped_heads import taken_apart
from tests.tiny_models import tiny_model

JOINED = ".attention.wqkv."


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 16), (10, 2, 8)])
def test_queries_of_a_group_stand_before_its_key_and_its_value(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    folder = tiny_model()
    settings = DecoderSettings.from_info(ModelInfo.from_directory(str(folder)))
    settings = replace(settings, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    stored = open_files([folder / "model.safetensors"], DirectReader())["model.layers.0.mlp.up_proj.weight"]
    found = dict(taken_apart(settings, f"model.layers.0{JOINED}weight", stored, JOINED))
    groups = np.split(stored.whole().numpy(), num_kv_heads)
    queries, keys = num_heads // num_kv_heads * head_dim, head_dim
    cuts = [np.split(group, [queries, queries + keys]) for group in groups]
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        whole = found[f"model.layers.0.self_attn.{name}.weight"].whole().numpy()
        assert (whole == np.concatenate([cut[part] for cut in cuts])).all()
    assert list(taken_apart(settings, "model.norm.weight", stored, JOINED)) == [("model.norm.weight", stored)]
