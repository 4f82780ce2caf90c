"""ChatGLM 2, 3 and GLM-4 as they were published: half of each head turned, in pairs; fused tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.tensor_view import pairs_to_halves, split_rows
from app.errors import UnsupportedError
from app.layers.rope_scaling import RopeSettings
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import DecoderSettings

_NAMES: list[Rule] = [
    (r"^transformer\.embedding\.word_embeddings\.", "model.embed_tokens."),
    (r"^transformer\.output_layer\.", "lm_head."),
    (r"^transformer\.encoder\.final_layernorm\.", "model.norm."),
    (r"^transformer\.encoder\.layers\.", "model.layers."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
]
_USUAL = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False}


class ChatGLMModel(CausalLM):
    """Reads a rotation's base as 10,000 times `rope_ratio`."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError names what no published model has, and learned prefixes."""
        hf = info.hf_config
        for name, usual in {**_USUAL, "original_rope": True, "pre_seq_len": 0}.items():
            if hf.get(name, usual) != usual:
                raise UnsupportedError(f"ChatGLM with {name}={hf[name]!r:.80} is not supported", param="model")
        heads = int(hf.get("multi_query_group_num", 1)) if hf.get("multi_query_attention") else info.num_heads
        if heads < 1 or info.num_heads % heads:
            raise UnsupportedError(f"multi_query_group_num={heads} of {info.num_heads} heads", param="model")
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        bias = bool(hf.get("add_bias_linear", False))
        return replace(
            settings,
            num_kv_heads=heads,
            qkv_bias=bias or bool(hf.get("add_qkv_bias", False)),
            output_bias=bias,
            mlp_bias=bias,
            rotary_dim=settings.head_dim // 2,
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """Half of a head."""
        theta, context = 10_000.0 * float(info.hf_config.get("rope_ratio", 1.0)), info.max_position_embeddings
        return lambda _: RopeSettings(settings.rotary_dim, theta, "default", context, max_model_len)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Our names, fused tensors taken apart, dimensions of queries and keys in our order."""
        if name.endswith(".inv_freq"):
            return
        s, own = settings, renamed(name, _NAMES)
        head, found, leaf = own.rpartition(".mlp.dense_h_to_4h.")
        if found:
            for part, rows in split_rows(tensor, dict.fromkeys(("gate_proj", "up_proj"), s.intermediate_size)):
                yield f"{head}.mlp.{part}.{leaf}", rows
            return
        head, found, leaf = own.rpartition(".self_attention.query_key_value.")
        if not found:
            yield own, tensor
            return
        keys = s.num_kv_heads * s.head_dim
        for part, rows in split_rows(tensor, {"q_proj": s.num_heads * s.head_dim, "k_proj": keys, "v_proj": keys}):
            turned = rows if part == "v_proj" else pairs_to_halves(rows, s.head_dim, s.rotary_dim)
            yield f"{head}.self_attn.{part}.{leaf}", turned
