"""Baichuan 1 and 2, as they were published: Llama with one matrix for queries, keys and values; the 13B with ALiBi."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import computed, split_rows
from app.models.alibi import alibi_slopes
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings

_FIRST_VOCABULARY = 64_000  # Baichuan 1's; the second generation's heads are normed


def _unit_rows(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x)


class BaichuanForCausalLM(CausalLM):
    """The second generation's head has rows of length 1."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, which names a number of positions where these rotate."""
        settings = DecoderSettings.from_info(info)
        if "max_position_embeddings" in info.hf_config:
            return settings
        slopes = tuple(alibi_slopes(settings.num_heads))
        return replace(settings, alibi_slopes=slopes, rope_types=(NO_ROPE,) * settings.num_layers)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names, `W_pack` taken apart, the head normed."""
        head, found, leaf = name.rpartition(".W_pack.")
        if found:
            width = settings.num_heads * settings.head_dim
            for part, rows in split_rows(tensor, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)):
                yield f"{head}.{part}.{leaf}", rows
        elif name == "lm_head.weight" and settings.vocab_size != _FIRST_VOCABULARY:
            yield name, computed(tensor, _unit_rows)
        elif not name.endswith(".inv_freq"):
            yield name, tensor
