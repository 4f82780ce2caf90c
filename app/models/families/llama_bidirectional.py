"""Llama whose tokens see the whole text, as NVIDIA publishes it for retrieval (Llama-Nemotron-Embed and -Rerank)."""

from __future__ import annotations

import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.models.decoder_pooling import DecoderForPooling
from app.models.families.llama import LlamaForCausalLM


class LlamaBidirectional(DecoderForPooling):
    """Gives vectors, or logits that are divided by a `temperature`."""

    family = LlamaForCausalLM

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        given = info.hf_config.get("temperature")
        self.temperature = 1.0 if given is None else given
        if not isinstance(self.temperature, int | float) or self.temperature <= 0:
            what = f"temperature is to be more than 0, not {given!r:.80}"
            raise CheckpointError(f"{info.directory}/config.json is not usable: {what}", param="model")

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """See DecoderForPooling."""
        return super().classify(pooled) / self.temperature
