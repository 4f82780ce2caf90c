"""DiffLlama: Llama with differential attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import rows_of
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.differential_attention import DifferentialAttention
from app.models.blocks import Blocks, LayerPlace, attention_settings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings


def _attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> DifferentialAttention:
    shape = attention_settings(settings, place)
    return DifferentialAttention(ctx, shape, place.cache_index, place.rotary, layer=place.index)


class DiffLlamaForCausalLM(CausalLM):
    """A head and the one half of all heads behind it are a pair."""

    blocks = Blocks(attention=_attention)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        bias = bool(info.hf_config.get("attention_bias", False))
        return replace(DecoderSettings.from_info(info, norm_eps=1e-5), qkv_bias=bias, output_bias=bias)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; heads of a pair side by side."""
        if not any(f".{part}_proj." in name for part in "qkv"):
            return [(name, tensor)]
        pairs = settings.num_kv_heads // 2

        def paired(x: torch.Tensor) -> torch.Tensor:
            if not pairs or len(x) % (2 * pairs):
                raise CheckpointError(f"{name} has {len(x)} rows, no {pairs} pairs of heads", param="model")
            return x.view(2, pairs, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

        return [(name, rows_of(tensor, paired))]
