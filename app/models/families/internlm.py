"""InternLM 2 and 3, as they were published: Llama with other names, and with biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.tensor_view import rows_of
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.families.gpt_neox import part_of_heads

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
        own = renamed(name, _NAMES)
        head, found, leaf = own.rpartition(".attention.wqkv.")
        if not found:
            yield own, tensor
            return
        queries = settings.num_heads // settings.num_kv_heads
        for part, first, count in (("q_proj", 0, queries), ("k_proj", queries, 1), ("v_proj", queries + 1, 1)):
            take = partial(part_of_heads, head_dim=settings.head_dim, group=queries + 2, first=first, count=count)
            yield f"{head}.self_attn.{part}.{leaf}", rows_of(tensor, take)


class InternLM3ForCausalLM(CausalLM):
    """Llama's names."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        bias, qkv_bias = bool(hf.get("bias", False)), bool(hf.get("qkv_bias", False))
        return replace(DecoderSettings.from_info(info), qkv_bias=qkv_bias, output_bias=bias, mlp_bias=bias)
