"""Cohere's Command R: blocks beside each other, norms without bias, rotation in pairs, scaled logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import computed, pairs_to_halves
from app.models.blocks import Blocks, unbiased_layer_norm
from app.models.decoder import CausalLM
from app.models.decoder_layers.parallel import ParallelLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings, every_nth_full, layer_types, windows_of


def cohere_settings(info: ModelInfo) -> DecoderSettings:
    """Returns what both generations have in common."""
    bias = bool(info.hf_config.get("attention_bias", False))
    return replace(
        DecoderSettings.from_info(info, tied=True, norm_eps=1e-5),
        qkv_bias=bias,
        output_bias=bias,
        logit_scale=float(info.hf_config.get("logit_scale", 0.0625)),
    )


class CohereForCausalLM(CausalLM):
    """Command R; R+ norms queries and keys, each head with weights of its own."""

    blocks = Blocks(norm=unbiased_layer_norm, layer=ParallelLayer)
    rope_defaults = MappingProxyType({"rope_theta": 500_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        settings = cohere_settings(info)
        return replace(settings, qk_norm="head_layer_norm") if info.hf_config.get("use_qk_norm") else settings

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Dimensions of queries and keys in our order."""
        if ".q_proj." in name or ".k_proj." in name:
            return [(name, pairs_to_halves(tensor, settings.head_dim, settings.head_dim))]
        if ".q_norm." in name or ".k_norm." in name:
            dim = settings.head_dim
            return [(name, computed(tensor, lambda x: x.view(-1, dim // 2, 2).transpose(1, 2).reshape(-1, dim)))]
        return [(name, tensor)]


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and A: layers that see everything know no positions, the others have a window."""

    rope_defaults = MappingProxyType({"rope_theta": 10_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        types = layer_types(info, every_nth_full(info, int(info.hf_config.get("sliding_window_pattern") or 4)))
        return replace(
            cohere_settings(info),
            sliding_windows=windows_of(info, types, 4096),
            rope_types=tuple("" if kind == "sliding_attention" else NO_ROPE for kind in types),
        )
