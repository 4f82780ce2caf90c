"""Nomic BERT and Jina Embeddings v3: BERT with rotary positions; Nomic's with a gated feed-forward layer and no biases,
or (v2) with experts.

Both were published in a layout of their own before transformers had them; either is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from torch import nn

from app.checkpoints.fields.kinds import FLAG, expect
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import viewed
from app.errors import CheckpointError, UnsupportedError
from app.kernels.moe import GLU, RoutingRule
from app.layers.context import BuildContext
from app.layers.experts.biased import BiasedExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.layers.rope_scaling import RopeSettings
from app.models.encoder import Encoder, EncoderModel, EncoderSettings, Fused

_REFUSED = ("prenorm", "rotary_emb_interleaved", "use_rms_norm", "rotary_scaling_factor")
_REFUSED_EXPERTS = ("expert_choice_router", "num_shared_experts")
_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")


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
        (r"\.mlp\.router\.layer\.", ".mlp.gate."),
        (r"\.mlp\.experts\.bias$", ".mlp.bias"),
        (r"\.mlp\.(fc11|fc1)\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    )
    fused = MappingProxyType({".Wqkv.": Fused.heads()})  # in one of the layouts
    theta: ClassVar[float]  # where config.json says none

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.num_experts = info.num_experts

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


class NomicBertModel(RotaryBertModel):
    """nomic-embed-text v1, v1.5, and v2 with experts in every second layer."""

    prefix = "nomic_bert."
    theta = 1000.0

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """SwiGLU without biases, or GELU with them. UnsupportedError for another function, or biases in some products
        only."""
        hf = info.hf_config
        act = str(hf.get("activation_function", hf.get("hidden_act", "silu")))
        if act not in ("swiglu", "silu", "gelu"):
            raise UnsupportedError(f"activation_function={act!r} is not supported with NomicBertModel", param="model")
        gated = act != "gelu"
        if any(bool(hf.get(name, not gated)) is gated for name in _BIASES if name in hf):
            named = ", ".join(f"{name}={hf[name]}" for name in _BIASES if name in hf)
            raise UnsupportedError(f"{named} with activation_function={act!r} is not supported", param="model")
        settings = super().settings(info)
        return replace(settings, is_gated=gated, has_biases=not gated, hidden_act="silu" if gated else "gelu")

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """Experts in the layers that have them."""
        settings, experts = self.settings(info), _experts(info)
        if experts is None:
            return Encoder(ctx, settings)
        mlps = [
            BiasedExpertMLP(ctx, settings.hidden_size, settings.hidden_act, experts)
            if place in experts.layers
            else None
            for place in range(settings.num_layers)
        ]
        return Encoder(ctx, settings, mlps=mlps)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """All experts' matrices lie one below the other, the second ones turned."""
        for own, one in super().own_tensors(name, tensor):
            head, _, leaf = own.rpartition(".mlp.experts.mlp.")
            if leaf not in _EXPERTS:
                yield own, one
                continue
            part, is_turned = _EXPERTS[leaf]
            for number, rows in enumerate(one.mapped.chunk(self.num_experts)):
                view = viewed(one, rows.t() if is_turned else rows)
                yield f"{head}.mlp.experts.{number}.{part}.weight", view


_EXPERTS = {"w1": ("up_proj", False), "w2": ("down_proj", True)}


def _experts(info: ModelInfo) -> ExpertSettings | None:
    """Layers 1, 1 + n, ... have experts, of which a token goes to the best two."""
    hf = info.hf_config
    if not hf.get("num_experts"):
        return None
    for name in _REFUSED_EXPERTS:
        if hf.get(name):
            raise UnsupportedError(f"{name}={hf[name]!r} is not supported with {info.architecture}", param="model")
    every = int(hf.get("moe_every_n_layers", 2))
    renormalize = hf.get("moe_normalize_expert_weights") or False
    expect(renormalize, FLAG, "moe_normalize_expert_weights of config.json")
    rule = RoutingRule(top_k=int(hf.get("moe_top_k", 2)), renormalize=renormalize)
    try:
        return ExpertSettings(
            num_experts=int(hf["num_experts"]),
            intermediate_size=info.intermediate_size,
            rule=rule,
            layers=frozenset(range(1, info.num_layers, every)),
            activation=GLU("plain_gelu"),
        )
    except ValueError as error:
        raise CheckpointError(f"{info.directory}/config.json is not usable: {error}", param="model") from error


class JinaEmbeddingsV3Model(RotaryBertModel):
    """jina-embeddings-v3, merged with the adapter of a task or without any."""

    theta = 20_000.0
