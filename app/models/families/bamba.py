"""Bamba: Mamba 2, and attention in some layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.layers.context import BuildContext
from app.models.blocks import Blocks, grouped_query_attention
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.mixers import FULL, LINEAR, ByKind, mamba2_mixer, mamba2_settings, mamba2_tensors

BAMBA_NAMES: list[Rule] = [
    (r"\.mamba\.", ".self_attn."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.final_layernorm\.", ".norm."),
]


class BambaForCausalLM(CausalLM):
    """Half of an attention head turns."""

    rope_defaults = MappingProxyType({"partial_rotary_factor": 0.5})

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.mamba = mamba2_settings(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        mamba2_settings(info)
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        attends = set(info.hf_config.get("attn_layer_indices") or ())
        kinds = tuple(FULL if i in attends else LINEAR for i in range(info.num_layers))
        mixers = {LINEAR: mamba2_mixer(mamba2_settings(info)), FULL: grouped_query_attention}
        return Blocks(attention=ByKind(kinds, mixers))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names, and the parts of Mamba's projection."""
        return mamba2_tensors(self.mamba, renamed(name, BAMBA_NAMES), tensor)
