"""The part that decoders with latent attention (MLA) share: how config.json speaks of it, and its block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import is_behind_last_layer
from app.layers.context import BuildContext
from app.layers.latent_attention import LatentAttention, LatentSettings
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import DecoderSettings


def latent_attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> LatentAttention:
    """Latent attention of a family whose settings have `latent`."""
    s = settings
    assert s.latent is not None, "a family without latent attention"
    return LatentAttention(ctx, s.latent, s.hidden_size, s.num_heads, place.cache_index, place.rotary)


def latent_settings(info: ModelInfo) -> LatentSettings:
    """The sizes, under the names of DeepSeek's configurations."""
    hf = info.hf_config
    nope, rope = int(hf["qk_nope_head_dim"]), int(hf["qk_rope_head_dim"])
    rank = hf.get("q_lora_rank")
    return LatentSettings(
        latent_size=int(hf["kv_lora_rank"]),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=int(hf["v_head_dim"]),
        query_rank=None if rank is None else int(rank),
        scale=(nope + rope) ** -0.5 * score_stretch(hf.get("rope_parameters") or hf.get("rope_scaling") or {}),
        interleaved=bool(hf.get("rope_interleave", True)),
        bias=bool(hf.get("attention_bias", False)),
    )


def score_stretch(rope: Mapping[str, Any]) -> float:
    """Returns what YaRN multiplies the scores by: its scale of queries and of keys, which cosines and sines leave
    out here."""
    weight = rope.get("mscale_all_dim")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not weight:
        return 1.0
    factor = float(rope["factor"])
    return 1.0 if factor <= 1 else (0.1 * float(weight) * math.log(factor) + 1.0) ** 2


class LatentCausalLM(CausalLM):
    """A dense decoder with latent attention and Llama's names for the rest."""

    blocks = Blocks(attention=latent_attention)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; what rotates is a part of its own, not of the head."""
        latent = latent_settings(info)
        bias = bool(info.hf_config.get("mlp_bias", False))
        return replace(DecoderSettings.from_info(info), head_dim=latent.rope_dim, latent=latent, mlp_bias=bias)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """All of the part that rotates does; `partial_rotary_factor` is its share of a head."""
        hf = {name: value for name, value in info.hf_config.items() if name != "partial_rotary_factor"}
        for name in ("rope_parameters", "rope_scaling"):
            if name in hf:
                hf[name] = {**hf[name], "partial_rotary_factor": 1.0}
        return super().ropes(replace(info, hf_config=hf), settings, max_model_len)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """All but those of the layers that only predict further tokens."""
        return [] if is_behind_last_layer(name, settings.num_layers) else [(name, tensor)]

    def own_name(self, name: str) -> str | None:
        """See EngineModel.own_name."""
        return None if is_behind_last_layer(name, self.decoder_settings.num_layers) else name
