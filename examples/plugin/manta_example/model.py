"""Arcee: Llama whose feed-forward layers have no gate and square what their ReLU lets through."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.blocks import Blocks, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_pooling import DecoderForPooling
from app.models.decoder_settings import DecoderSettings


class ArceeForCausalLM(CausalLM):
    """The tensors have Llama's names, so there is nothing to say of them."""

    blocks = Blocks(mlp=plain_mlp)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(
            DecoderSettings.from_info(info, hidden_act="relu2"), mlp_bias=bool(info.hf_config.get("mlp_bias"))
        )


class ArceeForPooling(DecoderForPooling):
    """The same for embeddings."""

    family = ArceeForCausalLM
