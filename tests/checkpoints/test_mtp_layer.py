from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.mtp_layer import FULL, missing_of_mtp, promises_mtp, with_layer_behind

LAYER = ("self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.experts.0.up_proj.weight_scale_inv")
OWN = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "embed_tokens.weight")
NAMES = [f"model.layers.{layer}.{name}" for layer in (0, 1, 2) for name in LAYER]
NAMES += [f"model.layers.2.{name}" for name in OWN] + ["model.embed_tokens.weight", "lm_head.weight"]


def info_of(directory: Path, architecture: str = "Glm4MoeForCausalLM", layers: int = 1) -> ModelInfo:
    hf = {"architectures": [architecture], "num_hidden_layers": 2, "num_nextn_predict_layers": layers}
    return ModelInfo(directory, hf, {})


def write_index(directory: Path, names: list[str]) -> None:
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))


def missing(directory: Path, load_format: str = "auto") -> str | None:
    return missing_of_mtp(info_of(directory), load_format)


def test_config_json_promises_it_for_some_families(tmp_path: Path) -> None:
    assert promises_mtp(info_of(tmp_path))
    assert promises_mtp(info_of(tmp_path, "DeepseekV3ForCausalLM"))
    assert not promises_mtp(info_of(tmp_path, "LlamaForCausalLM"))
    assert not promises_mtp(info_of(tmp_path, layers=0))


def test_an_index_tells_what_is_there_before_weights_are(tmp_path: Path) -> None:
    write_index(tmp_path, NAMES)
    assert missing(tmp_path) is None
    assert missing(tmp_path, "safetensors") is None


@pytest.mark.parametrize("name", [*LAYER, *OWN[:-1]])
def test_what_lacks_is_named(tmp_path: Path, name: str) -> None:
    """A layer that other layers were quantized beside lacks their scales."""
    write_index(tmp_path, [each for each in NAMES if each != f"model.layers.2.{name}"])
    assert name.removesuffix(".weight").removeprefix("shared_head.") in str(missing(tmp_path))


def test_each_family_has_its_own_names(tmp_path: Path) -> None:
    """Those of Qwen 3.5 as published, under a model that also sees; the layer is like the last one that attends."""
    hf = {"architectures": ["Qwen3_5ForConditionalGeneration"], "num_hidden_layers": 2, "mtp_num_hidden_layers": 1}
    info = ModelInfo(tmp_path, {**hf, "layer_types": ["linear_attention", FULL]}, {})
    held = ["fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"]
    names = [f"mtp.{name}" for name in held] + [f"mtp.layers.0.{name}" for name in LAYER[:2]]
    names += [f"model.language_model.layers.{layer}.{name}" for layer in (0, 1) for name in LAYER[:2]]
    write_index(tmp_path, names)
    assert promises_mtp(info)
    assert missing_of_mtp(info, "auto") is None
    write_index(tmp_path, [name for name in names if "mtp.layers.0.self_attn" not in name])
    assert "self_attn.q_proj" in str(missing_of_mtp(info, "auto"))
    longer = with_layer_behind(info)
    assert (longer.num_layers, longer.hf_config["layer_types"]) == (3, [FULL] * 3)


def test_nemotron_h_drafts_where_it_is_asked_alone(tmp_path: Path) -> None:
    """Marks of layers get longer by one."""
    hf = {"architectures": ["NemotronHForCausalLM"], "num_nextn_predict_layers": 1, "hybrid_override_pattern": "ME*E"}
    info = ModelInfo(tmp_path, hf, {})
    assert promises_mtp(info)
    assert not promises_mtp(info, by_default=True)
    longer = with_layer_behind(info)
    assert (longer.num_layers, longer.hf_config["hybrid_override_pattern"]) == (5, "ME*EE")


def test_config_json_of_qwen3_next_need_not_promise_it(tmp_path: Path) -> None:
    info = ModelInfo(tmp_path, {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 2}, {})
    assert promises_mtp(info)
    write_index(tmp_path, [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in LAYER])
    assert "no tensor of it for self_attn.q_proj" in str(missing_of_mtp(info, "auto"))


def test_a_file_tells_by_its_header(tmp_path: Path) -> None:
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(NAMES)}
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * len(NAMES)))
    assert missing(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "no safetensors file, or damaged" in str(missing(tmp_path))


def test_names_that_nobody_knows_are_none(tmp_path: Path) -> None:
    assert "holds no weights" in str(missing(tmp_path))
    assert "not known before it is loaded" in str(missing(tmp_path, "dummy"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "not known before it is loaded" in str(missing(tmp_path))
