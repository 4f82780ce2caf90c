"""MiniCPM3: a dense decoder with latent attention; embeddings, what blocks add, and logits are scaled."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder_settings import DecoderSettings
from app.models.families.minicpm import with_scales
from app.models.latent import LatentCausalLM, latent_settings


class MiniCPM3ForCausalLM(LatentCausalLM):
    """Runs MiniCPM3: what rotates together lies in halves, as in Llama."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, with the family's defaults."""
        hf = info.hf_config
        base = DecoderSettings.from_info(info, tied=True, norm_eps=1e-5)
        with_value = {"v_head_dim": info.hidden_size // info.num_heads, **hf}
        latent = replace(latent_settings(replace(info, hf_config=with_value)), interleaved=False)
        settings = replace(base, head_dim=latent.rope_dim, latent=latent)
        return with_scales(settings, info, embeds=12.0, depth=1.4, base=256.0)
