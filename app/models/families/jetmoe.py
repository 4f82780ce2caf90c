"""JetMoE: experts in both halves of a layer: for queries and outputs of attention, and for feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.stacked_experts import DOWN, HALVES, unstacked
from app.checkpoints.tensors.tensor_view import computed, split_rows
from app.kernels.moe import RoutingRule
from app.layers.context import BuildContext
from app.layers.experts.biased import BiasedExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.layers.mixture_of_attention import MixtureOfAttention
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace, attention_settings, rms_norm
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings

_LAYER_EPS = 1e-6  # of layers' norms, whatever config.json says of the last one's
_NAMES: list[Rule] = [
    (r"\.self_attention\.experts\.router\.layer\.", ".self_attn.gate."),
    (r"\.self_attention\.experts\.bias$", ".self_attn.o_proj.bias"),
    (r"\.self_attention\.", ".self_attn."),
    (r"\.mlp\.router\.layer\.", ".mlp.gate."),
]


def _norm(ctx: BuildContext, settings: DecoderSettings, before_linear: bool) -> Norm:
    return rms_norm(ctx, replace(settings, norm_eps=_LAYER_EPS) if before_linear else settings, before_linear)


def _attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> MixtureOfAttention:
    assert settings.experts is not None
    shape = attention_settings(settings, place)
    return MixtureOfAttention(ctx, shape, settings.experts, place.cache_index, place.rotary)


def _mlp(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> BiasedExpertMLP:
    assert settings.experts is not None
    return BiasedExpertMLP(ctx, settings.hidden_size, settings.hidden_act, settings.experts)


class JetMoeForCausalLM(CausalLM):
    """JetMoE 8B: softmax over the logits of those experts that are chosen."""

    blocks = Blocks(norm=_norm, attention=_attention, mlp=_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        experts = ExpertSettings(
            num_experts=int(hf.get("num_local_experts", 8)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(top_k=int(hf.get("num_experts_per_tok", 2)), scoring="softmax_of_chosen"),
            layers=frozenset(range(info.num_layers)),
            rounds_weights=True,
        )
        settings = DecoderSettings.from_info(info, tied=True)
        return replace(settings, num_heads=info.num_kv_heads * experts.rule.top_k, experts=experts)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; experts' queries and outputs in our order."""
        s, own = settings, renamed(name, _NAMES)
        assert s.experts is not None
        number, keys, dim = s.experts.num_experts, s.num_kv_heads, s.head_dim
        head, found, leaf = own.rpartition(".self_attn.kv_proj.")
        if found:
            parts = split_rows(tensor, dict.fromkeys(("k_proj", "v_proj"), keys * dim))
            return [(f"{head}.self_attn.{part}.{leaf}", one) for part, one in parts]
        head, found, leaf = own.rpartition(".self_attn.experts.")
        if leaf == "input_linear.weight":

            def queries(x: torch.Tensor) -> torch.Tensor:
                return x.view(number, keys, dim, -1).transpose(0, 1).reshape(-1, x.shape[-1])

            return [(f"{head}.self_attn.q_proj.weight", computed(tensor, queries))]
        if leaf == "output_linear.weight":

            def outputs(x: torch.Tensor) -> torch.Tensor:
                return x.view(number, -1, keys, dim).permute(1, 2, 0, 3).reshape(x.shape[1], -1)

            return [(f"{head}.self_attn.o_proj.weight", computed(tensor, outputs))]
        for part, cuts in (("input_linear", HALVES), ("output_linear", DOWN)):
            head, found, leaf = own.rpartition(f".mlp.{part}.")
            if found:
                return unstacked(f"{head}.mlp.experts", leaf, tensor, cuts)
        return [(own, tensor)]
