"""A decoder's layers of latent attention and experts in one launch (`kernels/whole_step/latents`), where a step brings
one token. Layers without experts before them are computed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from app.kernels.moe import GLU, RoutingRule
from app.kernels.whole_step import StepToken
from app.kernels.whole_step.latents import LATENT_STEPS, LatentLayer, LatentShape, LatentStep
from app.layers.context import BuildContext, ForwardContext
from app.layers.experts.expert_mlp import ExpertMLP
from app.layers.experts.shared_experts import SharedAmongExperts
from app.layers.latent_attention import NORM_EPS, LatentAttention
from app.layers.norm import RMSNorm
from app.layers.rotary import RotaryEmbedding
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import DecoderSettings
from app.models.step_experts import is_adapted
from app.models.whole_step import are_decodes, is_long, may_be_whole


class LatentDecoderStep:
    """Runs steps of one token, of which nobody wants more than what the last layer gives."""

    def __init__(
        self, step: LatentStep, first: Sequence[PreNormLayer], layers: Sequence[PreNormLayer], rotary: RotaryEmbedding
    ) -> None:
        """`first`: those before the layers that the step computes."""
        self._step, self._first, self._layers, self._rotary = step, first, layers, rotary

    @classmethod
    def of(
        cls, ctx: BuildContext, settings: DecoderSettings, layers: Sequence[Any], rotaries: Sequence[RotaryEmbedding]
    ) -> LatentDecoderStep | None:
        """None: these layers, or this device, want launches of their own."""
        s = settings
        latent, experts = s.latent, s.experts
        if latent is None or experts is None or not may_be_whole(ctx, s, layers, rotaries):
            return None
        count = next((i for i, layer in enumerate(layers) if type(layer.mlp) is ExpertMLP), len(layers))
        first, own = layers[:count], layers[count:]
        if not own or any(type(layer) is not PreNormLayer for layer in layers):
            return None
        rule = RoutingRule(experts.rule.top_k, num_shared=own[0].mlp.experts.num_shared)
        if not all(_is_plain(layer, s, rule) for layer in own) or rotaries[0].cos.shape[-1] != latent.rope_dim:
            return None
        shape = LatentShape(
            s.hidden_size, s.num_heads, latent.nope_dim, latent.rope_dim, latent.value_dim, latent.latent_size,
            s.norm_eps, NORM_EPS, latent.scale, experts.intermediate_size, experts.num_experts, rule.top_k,
            rule.num_shared,
        )  # fmt: skip
        steps = (make(shape, ctx.device) for make in LATENT_STEPS.all_on(ctx.device))
        step = next((one for one in steps if one is not None), None)
        return None if step is None else cls(step, first, own, rotaries[0])

    def longest(self, rows: int) -> int | None:
        """See EngineModel.longest_at_once."""
        return 0 if rows > 1 or any(map(_is_changed, self._layers)) else self._step.longest

    def run(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor | None:
        """x [1, C], which may be overwritten -> what the last layer gives; None: the step is not such a one."""
        attention: Any = self._layers[0].self_attn
        meta = ctx.attention[attention.layer_index]
        if not are_decodes(x, meta, ctx) or is_long(meta, self.longest(len(x))):
            return None
        rotation = self._rotary.of_step(ctx)
        if rotation.query_scale is not None:
            return None
        layers = [_tensors(layer, ctx) for layer in self._layers]
        if not self._step.serves(x, layers):
            return None
        for layer in self._first:
            assert layer.input_layernorm is not None
            _, x = layer(layer.input_layernorm(x), x, None, ctx)
        token = StepToken(rotation.cos, rotation.sin, meta.slot_mapping, meta.seq_lens, meta.block_table)
        return self._step.run(x, layers, token)


def _is_plain(layer: Any, settings: DecoderSettings, rule: RoutingRule) -> bool:
    """True if a layer is V2-Lite's: queries without a latent of their own, a softmax over experts in fp32, some of them
    shared in slots behind the others'."""
    attention, mlp, s = layer.self_attn, layer.mlp, settings
    if type(attention) is not LatentAttention or type(mlp) is not ExpertMLP or attention.q_b_proj is not None:
        return False
    gate, experts, norms = mlp.gate, mlp.experts, (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(type(norm) is RMSNorm and norm.eps == s.norm_eps for norm in norms)
        and layer.scale == 1.0
        and attention.settings.interleaved
        and all(linear.bias is None and not linear.is_streamed for linear in (attention.input_proj, attention.o_proj))
        and gate.rule == rule
        and gate.bias is None
        and gate.e_score_correction_bias is None
        and type(mlp.shared_experts) is SharedAmongExperts
        and not mlp.num_identity
        and experts.map is None
        and not experts.weighs_input
        and experts.activation == GLU()
        and not any(linear.bias is not None or linear.is_streamed for linear in _experts(layer))
    )


def _is_changed(layer: Any) -> bool:
    """True if adapters add to it, its weights are stored otherwise, or the shared experts lie apart."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.input_proj, attention.o_proj)
    if is_adapted(mlp) or not mlp.experts.num_shared or not mlp.shared_experts.is_among:
        return True
    return any(one.packed is not None or one.delta is not None for one in linears) or any(
        one.packed is not None for one in _experts(layer)
    )


def _experts(layer: Any) -> tuple[Any, Any]:
    return layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj


def _tensors(layer: Any, ctx: ForwardContext) -> LatentLayer:
    attention, mlp = layer.self_attn, layer.mlp
    gate_up, down = _experts(layer)
    return LatentLayer(
        layer.input_layernorm.weight, attention.input_proj.weight, attention.kv_a_layernorm.weight,
        attention.kv_b_proj.heads, attention.o_proj.weight, layer.post_attention_layernorm.weight, mlp.gate.multiplier,
        gate_up.weight, down.weight, ctx.kv_caches[attention.layer_index],
    )  # fmt: skip
