"""MiniCPM3: a dense decoder with latent attention; embeddings, what blocks add, and logits are scaled."""

from __future__ import annotations

import math
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.decoder_settings import DecoderSettings
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
        depth = float(hf.get("scale_depth", 1.4))
        return replace(
            base,
            head_dim=latent.rope_dim,
            latent=latent,
            embedding_scale=float(hf.get("scale_emb", 12)),
            residual_scale=depth / math.sqrt(info.num_layers),
            logit_scale=float(hf.get("dim_model_base", 256)) / info.hidden_size,
        )
