"""Nomic BERT and Jina Embeddings v3: BERT with rotary positions, Nomic's with a gated feed-forward layer and no biases.

Both were published in a layout of their own before transformers had them; either is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.rope_scaling import RopeSettings
from app.models.encoder import EncoderModel, EncoderSettings

_REFUSED = ("prenorm", "rotary_emb_interleaved", "use_rms_norm", "num_experts", "rotary_scaling_factor")


class RotaryBertModel(EncoderModel):
    """A post-norm encoder with rotary positions."""

    prefix = ""
    roots = ("embeddings.", "emb_ln.", "encoder.", "layers.")
    names = (
        (r"^encoder\.", ""),
        (r"^(embeddings\.LayerNorm|emb_ln)\.", "embeddings.norm."),
        (r"\.(self_attn|attn|mixer)\.", ".attention."),
        (r"\.attention\.out_proj\.", ".attention.o_proj."),
        (r"\.(post_attention_layernorm|norm1)\.", ".attention_norm."),
        (r"\.(post_mlp_layernorm|norm2)\.", ".output_norm."),
        (r"\.mlp\.(fc11|fc1)\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    )
    theta: ClassVar[float]  # where config.json says none

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.size = info.hidden_size

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """The rotation of whole heads. UnsupportedError names what a published layout may ask for besides."""
        hf = info.hf_config
        for name in _REFUSED:
            if hf.get(name):
                raise UnsupportedError(f"{name}={hf[name]!r} is not supported with {info.architecture}", param="model")
        base = hf.get("rotary_emb_base", hf.get("rope_theta", cls.theta))
        head_dim = info.hidden_size // info.num_heads
        rope = RopeSettings.from_hf({"rope_theta": base, **hf}, head_dim, info.max_position_embeddings)
        eps = float(hf.get("layer_norm_epsilon", hf.get("layer_norm_eps", 1e-12)))
        return replace(EncoderSettings.from_info(info), num_positions=0, rope=rope, norm_eps=eps)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Query, key and value may lie in one."""
        for own, one in super().own_tensors(name, tensor):
            head, found, leaf = own.rpartition(".Wqkv.")
            if not found:
                yield own, one
                continue
            parts = split_rows(one, dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.size))
            yield from ((f"{head}.{part}.{leaf}", rows) for part, rows in parts)


class NomicBertModel(RotaryBertModel):
    """nomic-embed-text v1 and v1.5."""

    prefix = "nomic_bert."
    theta = 1000.0

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """SwiGLU without biases."""
        act = str(info.hf_config.get("activation_function", info.hf_config.get("hidden_act", "silu")))
        if act not in ("swiglu", "silu"):
            raise UnsupportedError(f"activation_function={act!r} is not supported with NomicBertModel", param="model")
        return replace(super().settings(info), is_gated=True, has_biases=False, hidden_act="silu")


class JinaEmbeddingsV3Model(RotaryBertModel):
    """jina-embeddings-v3, merged with the adapter of a task or without any."""

    theta = 20_000.0
