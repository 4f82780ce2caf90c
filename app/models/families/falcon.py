"""Falcon: attention and feed-forward layer beside each other; multi-query, grouped or plain heads, by its age."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.models.alibi import alibi_slopes
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_layers.parallel import ParallelLayer, TwoNormParallelLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.grouped_heads import taken_apart

_NAMES = [
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.ln_attn\.", ".input_layernorm."),
    (r"\.ln_mlp\.", ".post_attention_layernorm."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
]


class FalconForCausalLM(CausalLM):
    """`new_decoder_architecture` groups the heads, each group's queries before its key and its value."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; the oldest ones (Falcon-RW) have ALiBi instead of a rotation."""
        bias = bool(info.hf_config.get("bias", False))
        settings = DecoderSettings.from_info(info, tied=True, hidden_act="gelu", norm_eps=1e-5)
        settings = replace(settings, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
        if not info.hf_config.get("alibi"):
            return settings
        scale = settings.head_dim**-0.5  # their biases are added before the scores are scaled
        slopes = tuple(slope * scale for slope in alibi_slopes(settings.num_heads))
        return replace(settings, alibi_slopes=slopes, rope_types=(NO_ROPE,) * settings.num_layers)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Two norms in the newer ones, one in the older; one block after the other without `parallel_attn`."""
        hf = info.hf_config
        is_new = bool(hf.get("new_decoder_architecture", False))
        if not is_new and not hf.get("parallel_attn", True):
            return cls.blocks
        num_norms = hf.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
        return replace(cls.blocks, layer=TwoNormParallelLayer if is_new and num_norms == 2 else ParallelLayer)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Our names, `query_key_value` taken apart."""
        return taken_apart(settings, renamed(name, _NAMES), tensor, ".self_attention.query_key_value.")
