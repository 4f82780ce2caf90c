"""Bloom: ALiBi, layer norms (of the embeddings, too), biases everywhere, heads' queries, keys and values in turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.tensor_view import split_heads
from app.errors import UnsupportedError
from app.models.alibi import alibi_slopes
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings

_NAMES: list[Rule] = [
    (r"^(?:transformer\.)?(h|word_embeddings|word_embeddings_layernorm|ln_f)\.", r"model.\1."),
    (r"^model\.h\.", "model.layers."),
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"^model\.word_embeddings_layernorm\.", "model.embed_norm."),
    (r"^model\.ln_f\.", "model.norm."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
]


class BloomForCausalLM(CausalLM):
    """Bloom and BloomZ."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for sums with what was normed."""
        if info.hf_config.get("apply_residual_connection_post_layernorm"):
            raise UnsupportedError(
                "Bloom with apply_residual_connection_post_layernorm is not supported", param="model"
            )
        settings = DecoderSettings.from_info(info, tied=True, norm_eps=1e-5)
        return replace(
            settings,
            hidden_act="gelu_new",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            norms_embeddings=True,
            alibi_slopes=tuple(alibi_slopes(settings.num_heads)),
            rope_types=(NO_ROPE,) * settings.num_layers,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Our names, `query_key_value` taken apart."""
        head, found, leaf = renamed(name, _NAMES).rpartition(".self_attention.query_key_value.")
        if not found:
            yield renamed(name, _NAMES), tensor
            return
        sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), settings.head_dim)
        for part, rows in split_heads(tensor, settings.num_heads, sizes):
            yield f"{head}.self_attn.{part}.{leaf}", rows
