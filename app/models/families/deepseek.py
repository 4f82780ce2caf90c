"""DeepSeek V2, V2-Lite, V3 and R1, and the models that took their layers over: latent attention, experts in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.kernels.moe import GroupScore, RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.latent import LatentCausalLM

# How `topk_method` chooses: what a group of experts is worth (None: there are no groups), and whether the gate holds
# numbers that count in choosing only (DeepSeek-V3: "auxiliary-loss-free").
_METHODS: dict[str, tuple[GroupScore | None, bool]] = {
    "greedy": (None, False),
    "group_limited_greedy": ("max", False),
    "noaux_tc": ("top2", True),
}
_SCORING = ("softmax", "sigmoid")


# What a family's config.json may leave out.
_V2: dict[str, Any] = {
    **{"topk_method": "greedy", "scoring_func": "softmax", "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    **{"n_shared_experts": 2, "first_k_dense_replace": 0},
}
_V3: dict[str, Any] = {
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3},
}
_PLAIN_V3: dict[str, Any] = {
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    **{"n_shared_experts": 0, "first_k_dense_replace": 0},
}
_GLM: dict[str, Any] = {
    **_V3,
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8},
    "first_k_dense_replace": 1,
}


class DeepseekForCausalLM(CausalLM):
    """The first one (DeepSeekMoE 16B): Llama's attention, the experts of V2-Lite but for a gate in the model's type."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        bias = bool(info.hf_config.get("attention_bias", False))
        plain, experts = DecoderSettings.from_info(info), expert_settings(info, _V2)
        experts = None if experts is None else replace(experts, rounds_logits=True)
        return replace(plain, qkv_bias=bias, output_bias=bias, experts=experts)


class DeepseekV2ForCausalLM(LatentCausalLM):
    """V2 and V2-Lite: softmax; a group is worth its best expert."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(LatentCausalLM.settings(info), experts=expert_settings(info, _V2))


class DeepseekV3ForCausalLM(LatentCausalLM):
    """V3 and R1, Kimi K2, Moonlight: sigmoids, chosen with a correction; a group is worth its best two experts."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(LatentCausalLM.settings(info), experts=expert_settings(info, _V3))


class Glm4MoeLiteForCausalLM(LatentCausalLM):
    """GLM-4.7-Flash: experts as in DeepSeek-V3; config.json may name the kind of each layer."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        experts, layers = expert_settings(info, _GLM), layers_with_experts(info)
        if experts is not None and layers is not None:
            experts = replace(experts, layers=layers)
        return replace(LatentCausalLM.settings(info), experts=experts)


def expert_settings(info: ModelInfo, defaults: Mapping[str, Any]) -> ExpertSettings | None:
    """Reads what config.json says of experts; None where it has none. UnsupportedError names a rule that is unknown."""
    hf = {**defaults, **info.hf_config}
    if not hf.get("n_routed_experts"):
        return None
    size = int(hf["moe_intermediate_size"])
    return ExpertSettings(
        num_experts=int(hf["n_routed_experts"]),
        intermediate_size=size,
        rule=routing_rule(hf),
        layers=_expert_layers(hf, info.num_layers),
        rounds_logits=False,
        corrects=_METHODS[hf["topk_method"]][1],
        shared_size=size * int(hf["n_shared_experts"] or 0),
    )


def sigmoid_experts(info: ModelInfo, defaults: Mapping[str, Any]) -> ExpertSettings | None:
    """Experts of a family that took over DeepSeek-V3's rule, which its config.json does not name or names otherwise."""
    rule = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return expert_settings(replace(info, hf_config={**info.hf_config, **rule}), {**_PLAIN_V3, **defaults})


def layers_with_experts(info: ModelInfo) -> frozenset[int] | None:
    """The layers that `mlp_layer_types` calls sparse; None where it is not there."""
    kinds = info.hf_config.get("mlp_layer_types")
    return None if kinds is None else frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")


def _expert_layers(hf: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """`moe_layer_freq` says of each layer whether it has experts, or, as a number n, that every n-th has."""
    every = hf.get("moe_layer_freq", 1)
    if isinstance(every, list):
        if len(every) != num_layers:
            raise UnsupportedError(f"moe_layer_freq names {len(every)} of {num_layers} layers", param="model")
        return frozenset(index for index, has in enumerate(every) if has)
    return frozenset(i for i in range(int(hf["first_k_dense_replace"]), num_layers) if i % int(every) == 0)


def routing_rule(hf: Mapping[str, Any]) -> RoutingRule:
    """Reads how the gate chooses and weighs."""
    method, scoring = hf["topk_method"], hf["scoring_func"]
    for name, value, known in (("topk_method", method, tuple(_METHODS)), ("scoring_func", scoring, _SCORING)):
        if value not in known:
            raise UnsupportedError(f"{name}={value!r} of config.json; known: {', '.join(known)}", param="model")
    group_score = _METHODS[method][0]
    return RoutingRule(
        top_k=int(hf["num_experts_per_tok"]),
        scoring=scoring,
        renormalize=bool(hf["norm_topk_prob"]),
        scale=float(hf["routed_scaling_factor"]),
        num_groups=1 if group_score is None else int(hf["n_group"]),
        groups_chosen=1 if group_score is None else int(hf["topk_group"]),
        group_score=group_score or "max",
    )
