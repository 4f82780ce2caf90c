"""Qwen3-Next and Qwen 3.5: three layers of gated delta net to one of gated attention, with experts or without."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed, text_name
from app.checkpoints.tensors.stacked_experts import stacked_parts
from app.checkpoints.tensors.tensor_view import split_heads, split_rows
from app.kernels.recurrent import DeltaHeads
from app.layers.context import BuildContext
from app.layers.gated_delta_net import DeltaSettings
from app.models.blocks import Blocks, grouped_query_attention, offset_rms_norm
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.families.qwen_moe import expert_settings
from app.models.mixers import FULL, LINEAR, ByKind, checked_delta, delta_mixer, every_nth_attends, kinds_of

_NAMES: list[Rule] = [(r"\.linear_attn\.", ".self_attn."), (r"\.shared_expert\.", ".shared_experts.")]
_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def delta_settings(info: ModelInfo) -> DeltaSettings:
    """The shape of the layers without attention."""
    hf = info.hf_config
    keys, values, key_dim, value_dim = (
        int(hf.get(name, default)) for name, default in zip(_SIZES, (16, 32, 128, 128), strict=True)
    )
    width, eps = int(hf.get("linear_conv_kernel_dim", 4)), float(hf.get("rms_norm_eps", 1e-6))
    return checked_delta(DeltaSettings(DeltaHeads(keys, values, key_dim, value_dim), width, eps), info)


def layer_kinds(info: ModelInfo) -> tuple[str, ...]:
    """The kind of each layer: every fourth attends, where config.json does not say."""
    return kinds_of(info, every_nth_attends(info, int(info.hf_config.get("full_attention_interval", 4))))


class Qwen3NextForCausalLM(CausalLM):
    """Attention whose queries come with a gate; norms as Gemma's; a quarter of a head's dimensions rotate."""

    rope_defaults = MappingProxyType({"partial_rotary_factor": 0.25})
    delta: DeltaSettings

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.delta = delta_settings(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        delta_settings(info), layer_kinds(info)
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info),
            head_dim=int(hf.get("head_dim") or 256),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head_offset_rms",
            attention_gates=True,
            experts=_experts(info) if info.num_experts else None,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        mixers = {LINEAR: delta_mixer(delta_settings(info)), FULL: grouped_query_attention}
        return Blocks(norm=offset_rms_norm, attention=ByKind(layer_kinds(info), mixers))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Projections of heads apart, each of queries, keys and values in one piece; layers that draft are left out."""
        own = text_name(name)
        if own is None or own.startswith("mtp."):
            return []
        found = re.fullmatch(r"(.*\.)(in_proj_qkvz|in_proj_qkv|in_proj_ba)(\..*)", renamed(own, _NAMES))
        return self.tensors(self.decoder_settings, own, tensor) if found is None else self._split(found, tensor)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Those of layers that attend, with experts or without: each head's queries come with its gate."""
        own = renamed(name, _NAMES)
        if (found := re.fullmatch(r"(.*\.)q_proj(\..*)", own)) is None:
            return stacked_parts(own, tensor) or [(own, tensor)]
        sizes = {"q_proj": settings.head_dim, "gate_proj": settings.head_dim}
        parts = split_heads(tensor, settings.num_heads, sizes)
        return [(f"{found[1]}{part}{found[2]}", one) for part, one in parts]

    def _split(self, found: re.Match[str], tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        (path, module, leaf), h = found.groups(), self.delta.heads
        if module == "in_proj_qkv":
            sizes = dict(zip(("in_proj_q", "in_proj_k", "in_proj_v"), h.widths, strict=True))
            return [(f"{path}{part}{leaf}", one) for part, one in split_rows(tensor, sizes)]
        each = h.num_values // h.num_keys
        parts: dict[str, dict[str, int]] = {  # of one head, side by side
            "in_proj_qkvz": {
                **{"in_proj_q": h.key_dim, "in_proj_k": h.key_dim},
                **{"in_proj_v": each * h.value_dim, "in_proj_z": each * h.value_dim},
            },
            "in_proj_ba": {"in_proj_b": each, "in_proj_a": each},
        }
        return [(f"{path}{part}{leaf}", one) for part, one in split_heads(tensor, h.num_keys, parts[module])]


def _experts(info: ModelInfo) -> Any:
    hf = info.hf_config
    settings = expert_settings(info, 512, 10, 512)
    return replace(
        settings,
        rule=replace(settings.rule, renormalize=bool(hf.get("norm_topk_prob", True))),
        shared_size=int(hf.get("shared_expert_intermediate_size", 512)),
        gates_shared=True,
    )
