"""Youtu-LLM: a dense decoder with latent attention."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder_settings import DecoderSettings
from app.models.latent import LatentCausalLM


class YoutuForCausalLM(LatentCausalLM):
    """Embeddings are tied where config.json does not say."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        tied = bool(info.hf_config.get("tie_word_embeddings", True))
        return replace(LatentCausalLM.settings(info), tie_word_embeddings=tied)
