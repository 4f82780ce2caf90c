"""Phi-1 and Phi-2: attention and feed-forward layer beside each other, layer norms, partial rotation, biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_layers.parallel import ParallelLayer
from app.models.decoder_settings import DecoderSettings

_NAMES = [
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"^model\.final_layernorm\.", "model.norm."),
]


class PhiForCausalLM(CausalLM):
    """All linear layers and the head have biases."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp, layer=ParallelLayer)
    rope_defaults = MappingProxyType({"partial_rotary_factor": 0.5})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(
            DecoderSettings.from_info(info, hidden_act="gelu_new", norm_eps=1e-5),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
            qk_norm="head_biased_layer_norm" if info.hf_config.get("qk_layernorm") else None,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Phi's names as ours."""
        return [(renamed(name, _NAMES), tensor)]
