"""InternLM 2 and 3, as they were published: Llama with other names, and with biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.grouped_heads import taken_apart

_NAMES: list[Rule] = [
    (r"^model\.tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.wo\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
]


class InternLM2ForCausalLM(CausalLM):
    """One matrix holds the queries of each group of heads before its key and its value."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        bias = bool(info.hf_config.get("bias", True))
        return replace(DecoderSettings.from_info(info), qkv_bias=bias, output_bias=bias)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names, `wqkv` taken apart."""
        return taken_apart(settings, renamed(name, _NAMES), tensor, ".attention.wqkv.")


class InternLM3ForCausalLM(CausalLM):
    """Llama's names."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        bias, qkv_bias = bool(hf.get("bias", False)), bool(hf.get("qkv_bias", False))
        return replace(DecoderSettings.from_info(info), qkv_bias=qkv_bias, output_bias=bias, mlp_bias=bias)
