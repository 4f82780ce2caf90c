"""DeciLM and Llama-Nemotron (Puzzle: Bercovich et al., 2024), as they were published: Llama whose layers differ in
their heads and widths, and some of which have no attention, or no feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder import CausalLM
from app.models.decoder_layers.partial import PartialLayer
from app.models.decoder_settings import DecoderSettings
from app.models.families.llama import LlamaForCausalLM

_MULTIPLE = 256  # of which widths are


@dataclass(slots=True, frozen=True)
class _Plan:
    """Sizes of a layer; 0: it lacks the block."""

    num_kv_heads: int
    width: int


class DeciLMForCausalLM(CausalLM):
    """Reads `block_configs` (Nemotron), or `num_key_value_heads_per_layer` (DeciLM)."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """Llama's; numbers of key/value heads are those of the layer that has most."""
        plans = _plans(info)
        most = max((plan.num_kv_heads for plan in plans), default=0)
        if not most:
            raise UnsupportedError("block_configs: no layer attends", param="model")
        return replace(LlamaForCausalLM.settings(info), num_kv_heads=most)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own sizes."""
        plans = _plans(info)

        def layer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> PartialLayer:
            plan = plans[place.index]
            own = replace(settings, num_kv_heads=plan.num_kv_heads, intermediate_size=plan.width)
            return PartialLayer(ctx, own, place, blocks, attends=plan.num_kv_heads > 0, feeds=plan.width > 0)

        return Blocks(layer=layer)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; a layer without attention has no first norm."""
        return [] if name.endswith(".inv_freq") else [(name.replace(".input_layernorm.", ".first_norm."), tensor)]


def _plans(info: ModelInfo) -> tuple[_Plan, ...]:
    """UnsupportedError names what a layer may have that is not there."""
    hf = info.hf_config
    if (blocks := hf.get("block_configs")) is not None:
        plans = tuple(_Plan(_kv_heads(info, dict(block)), _width(info, dict(block))) for block in blocks)
    else:
        heads = hf.get("num_key_value_heads_per_layer") or [info.num_kv_heads] * info.num_layers
        plans = tuple(_Plan(int(number), info.intermediate_size) for number in heads)
    if len(plans) != info.num_layers:
        raise UnsupportedError(f"{len(plans)} of {info.num_layers} layers are described", param="model")
    for plan in plans:
        if plan.num_kv_heads and info.num_heads % plan.num_kv_heads:
            raise UnsupportedError(f"{info.num_heads} heads over {plan.num_kv_heads} of keys and values", param="model")
    return plans


def _kv_heads(info: ModelInfo, block: Mapping[str, Any]) -> int:
    attention = _part(block, "attention")
    if attention.get("no_op"):
        return 0
    group = int(attention["n_heads_in_group"])
    if group < 1 or info.num_heads % group:
        raise UnsupportedError(f"n_heads_in_group={group} of {info.num_heads} heads", param="model")
    return info.num_heads // group


def _width(info: ModelInfo, block: Mapping[str, Any]) -> int:
    feeds = _part(block, "ffn")
    if feeds.get("no_op"):
        return 0
    wanted = int(2 * float(feeds["ffn_mult"]) * info.hidden_size / 3)
    if wanted < 1:
        raise UnsupportedError(f"ffn_mult={feeds['ffn_mult']!r:.80}", param="model")
    return -(-wanted // _MULTIPLE) * _MULTIPLE


def _part(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = dict(block[name])
    for other in ("replace_with_linear", "sparsify", "num_sink_tokens", "window_length"):
        if part.get(other):
            raise UnsupportedError(f"block_configs: {name}.{other} is not supported", param="model")
    return part
