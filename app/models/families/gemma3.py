"""Gemma 3, text only: Gemma 2 with normed queries and keys instead of caps, and two ropes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import text_name
from app.layers.rope_scaling import RopeSettings
from app.models.blocks import Blocks, offset_rms_norm
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_layers.sandwich import SandwichLayer
from app.models.decoder_settings import DecoderSettings, every_nth_full, layer_types, windows_of
from app.models.families.gemma import gemma_settings


class Gemma3ForCausalLM(CausalLM):
    """Five layers with a window to each that sees everything."""

    blocks = Blocks(norm=offset_rms_norm, layer=SandwichLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. Where tokens see both ways (EmbeddingGemma), half a window is on each side."""
        hf = info.hf_config
        types = layer_types(info, every_nth_full(info, int(hf.get("sliding_window_pattern") or 6)))
        windows = windows_of(info, types, 4096)
        if not info.is_causal:
            windows = tuple(None if window is None else window // 2 + 1 for window in windows)
        return replace(
            gemma_settings(info),
            qk_norm="head_offset_rms",
            attention_scale=float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
            attention_soft_cap=hf.get("attn_logit_softcapping"),
            logit_soft_cap=hf.get("final_logit_softcapping"),
            sliding_windows=windows,
            rope_types=tuple(types),
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """Before transformers 5, the layers with a window had a base of their own, and no scaling."""
        hf = info.hf_config
        if "rope_parameters" in hf:
            return super().ropes(info, settings, max_model_len)
        limit = {"max_position_embeddings": info.max_position_embeddings}
        old: dict[str, dict[str, Any]] = {
            "sliding_attention": limit | {"rope_theta": hf.get("rope_local_base_freq", 10_000.0)},
            "full_attention": limit
            | {"rope_theta": hf.get("rope_theta", 1_000_000.0), "rope_scaling": hf.get("rope_scaling")},
        }
        return lambda layer_type: RopeSettings.from_hf(old[layer_type], settings.head_dim, max_model_len)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Leaves out what sees images."""
        own = text_name(name)
        return [] if own is None else [(own, tensor)]
