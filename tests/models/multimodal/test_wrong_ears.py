"""Encoders of sounds whose config.json cannot be right are refused by the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.errors import CheckpointError, UnsupportedError
from app.kernels.attention import reference
from app.layers.context import BuildContext
from app.models.multimodal.gemma3n_sound import Gemma3nEars
from app.models.multimodal.gemma_sound import Gemma4Ears
from app.models.multimodal.phi4_sound import Phi4Ears
from app.models.multimodal.qwen_sound import Qwen2_5OmniEars, Qwen3OmniEars
from tests.tiny_hearing import HEARING, hearing_model

EARS: dict[str, Any] = {
    "qwen2_5_omni": Qwen2_5OmniEars,
    "qwen3_omni": Qwen3OmniEars,
    "gemma3n": Gemma3nEars,
    "gemma4": Gemma4Ears,
    "phi4": Phi4Ears,
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"n_window": 1 << 20}, "n_window is 1048576") for name in ("qwen2_5_omni", "qwen3_omni")),
    *((name, {"d_model": 33}, "2 heads of 33") for name in ("qwen2_5_omni", "qwen3_omni")),
    *((name, {"encoder_layers": 1 << 30}, "encoder_layers is") for name in ("qwen2_5_omni", "qwen3_omni")),
    *((name, {"d_model": None}, "lacks d_model") for name in ("qwen2_5_omni", "qwen3_omni")),
    ("qwen3_omni", {"n_window_infer": 60}, "n_window_infer is less than a chunk"),
    ("qwen3_omni", {"downsample_hidden_size": -1}, "downsample_hidden_size is -1"),
    ("gemma3n", {"conf_num_attention_heads": 3}, "3 heads of 32"),
    ("gemma3n", {"conf_attention_context_right": 1}, "conf_attention_context_right other than 0"),
    ("gemma3n", {"sscp_conv_stride_size": [[2, 2], [1, 2]]}, "sscp_conv_stride_size other than 2"),
    ("gemma3n", {"sscp_conv_kernel_size": [[3, 3]]}, "sscp_conv_kernel_size is"),
    ("gemma3n", {"input_feat_size": 1, "sscp_conv_kernel_size": [[3, 3], [3, 8]]}, "input_feat_size=1 leaves no mels"),
    ("gemma3n", {"vocab_offset": 331}, "vocab_offset=331 leaves token 330 without a row"),
    ("gemma4", {"num_attention_heads": 3}, "3 heads of 32"),
    ("gemma4", {"attention_context_right": 4}, "attention_context_right other than 0"),
    ("gemma4", {"attention_context_left": 1 << 20}, "attention_context_left is"),
    ("gemma4", {"subsampling_conv_channels": [1 << 30, 4]}, "subsampling_conv_channels"),
    ("gemma4", {"gradient_clipping": "much"}, "gradient_clipping is 'much'"),
    ("phi4", {"chunk_size": 8}, "chunk_size=8; -1 is supported"),
    ("phi4", {"ext_pw_out_channel": 24}, r"2 heads and \[24, 32\] channels of 32"),
    ("phi4", {"bias_max_distance": 1 << 30}, "bias_max_distance is"),
    ("phi4", {"num_blocks": 0}, "num_blocks is 0"),
]


@pytest.mark.parametrize(("name", "changes", "says"), WRONG)
def test_what_is_wrong_is_named(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = json.loads((hearing_model(name) / "config.json").read_text())
    ears = {**config["audio_config"], **changes}
    config["audio_config"] = {field: value for field, value in ears.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = ModelInfo.from_directory(str(tmp_path))
    ctx = BuildContext(torch.float32, torch.device("meta"), 256, reference.OPS, ParallelGroups())
    with pytest.raises((CheckpointError, UnsupportedError), match=says) as caught:
        EARS[name](ctx, info)
    assert caught.value.param == "model"


def test_the_tiny_ones_are_right() -> None:
    assert set(EARS) < set(HEARING)
