"""A random tiny Gemma 3n in Hugging Face layout, and transformers' model of it without timm: where that would build the
tower of pictures stands ours, which `tests/models/multimodal/test_mobilenet_v5.py` compares with timm's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModel, Gemma3nForConditionalGeneration, Gemma3nVisionConfig

from app.distributed.parallel_groups import ParallelGroups
from app.kernels.attention import reference
from app.layers.context import BuildContext
from app.models.multimodal.mobilenet_v5 import MobileNetV5, scale_of

MELS = 12
SCALE = {"channel_multiplier": 0.05}
GEMMA3N: dict[str, Any] = {
    **{"image_token_id": 300, "boi_token_id": 302, "eoi_token_id": 303, "vision_soft_tokens_per_image": 256},
    **{"audio_token_id": 306, "boa_token_id": 307, "eoa_token_id": 308, "audio_soft_tokens_per_image": 13},
    "text_config": {
        **{"vocab_size": 331, "vocab_size_per_layer_input": 300, "hidden_size": 64, "intermediate_size": 112},
        **{"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        **{"sliding_window": 9, "num_kv_shared_layers": 1, "altup_num_inputs": 3, "laurel_rank": 8, "pad_token_id": 0},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16},
        **{"activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.9], "max_position_embeddings": 2048},
        **{"bos_token_id": 1, "eos_token_id": 2},
    },
    "vision_config": {"vocab_size": 5, "vocab_offset": 300, "hidden_size": 2048, "model_args": SCALE},
    "audio_config": {
        **{"vocab_size": 26, "vocab_offset": 305, "input_feat_size": MELS, "hidden_size": 32, "gradient_clipping": 3.0},
        **{"conf_num_hidden_layers": 2, "conf_num_attention_heads": 2, "conf_attention_chunk_size": 6},
        **{"conf_attention_context_left": 7, "conf_reduction_factor": 2, "sscp_conv_channel_size": [8, 6]},
    },
}


class Tower(nn.Module):
    """Ours, called as transformers calls timm's."""

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__()
        ctx = BuildContext(torch.float32, torch.device("cpu"), 256, reference.OPS, ParallelGroups())
        self.timm_model = MobileNetV5(ctx, scale_of(config.to_dict()), config.hidden_size)
        with torch.no_grad():
            for weight in self.timm_model.parameters():
                weight.fill_(0.5)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> SimpleNamespace:
        seen = self.timm_model(pixel_values)
        return SimpleNamespace(last_hidden_state=seen.transpose(1, 2).unflatten(2, (16, 16)).clone())


class Gemma3nJudge(Gemma3nForConditionalGeneration):  # type: ignore[misc]
    """transformers' model."""

    def __init__(self, config: Any) -> None:
        build = AutoModel.from_config

        def from_config(config: Any, **own: Any) -> nn.Module:
            return Tower(config) if isinstance(config, Gemma3nVisionConfig) else build(config, **own)

        with mock.patch.object(AutoModel, "from_config", from_config):
            super().__init__(config)


Gemma3nJudge.__name__ = "Gemma3nForConditionalGeneration"  # as config.json is to say
