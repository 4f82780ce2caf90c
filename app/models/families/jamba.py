"""Jamba: Mamba, attention without positions in some layers, experts in others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.stacked_experts import stacked_parts
from app.kernels.moe import RoutingRule
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.experts.settings import ExpertSettings
from app.layers.mamba import Mamba, MambaSettings
from app.models.blocks import Blocks, LayerPlace, grouped_query_attention
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.families.bamba import BAMBA_NAMES
from app.models.mixers import FULL, LINEAR, ByKind, mamba_tensors

_NAMES: list[Rule] = [(r"\.feed_forward\.router\.", ".mlp.gate."), *BAMBA_NAMES]


def _channels(info: ModelInfo) -> int:
    return int(info.hf_config.get("mamba_expand", 2)) * info.hidden_size


class JambaForCausalLM(CausalLM):
    """Mamba's dt, B and C are normed; experts weigh by the softmax over all of them."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.channels = _channels(info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        period, offset = int(hf.get("expert_layer_period", 2)), int(hf.get("expert_layer_offset", 1))
        count = int(hf.get("num_experts", 16))
        experts = ExpertSettings(
            num_experts=count,
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(top_k=int(hf.get("num_experts_per_tok", 2))),
            layers=frozenset(i for i in range(info.num_layers) if count > 1 and i % period == offset),
            rounds_weights=True,
        )
        return replace(
            DecoderSettings.from_info(info),
            rope_types=(NO_ROPE,) * info.num_layers,
            experts=experts if experts.layers else None,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        hf = info.hf_config
        period, offset = int(hf.get("attn_layer_period", 8)), int(hf.get("attn_layer_offset", 4))
        rank = hf.get("mamba_dt_rank", "auto")
        settings = MambaSettings(
            channels=_channels(info),
            state_size=int(hf.get("mamba_d_state", 16)),
            dt_rank=math.ceil(info.hidden_size / 16) if rank == "auto" else int(rank),
            conv_width=int(hf.get("mamba_d_conv", 4)),
            conv_bias=bool(hf.get("mamba_conv_bias", True)),
            bias=bool(hf.get("mamba_proj_bias", False)),
            inner_norms="weighted",
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        )

        def mamba(ctx: BuildContext, decoder: DecoderSettings, place: LayerPlace) -> AttentionLayer:
            return Mamba(ctx, decoder.hidden_size, settings, place.cache_index)

        kinds = tuple(FULL if i % period == offset else LINEAR for i in range(info.num_layers))
        return Blocks(attention=ByKind(kinds, {LINEAR: mamba, FULL: grouped_query_attention}))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; Mamba's two projections, and experts that are stored in one tensor, apart."""
        name = renamed(name, _NAMES)
        parts = stacked_parts(name, tensor)
        return mamba_tensors(self.channels, name, tensor) if parts is None else parts
