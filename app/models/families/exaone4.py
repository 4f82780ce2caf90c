"""Exaone 4: norms after the blocks and of each head's query and key; full layers know no positions."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.blocks import Blocks
from app.models.decoder import CausalLM
from app.models.decoder_layers.post_norm import PostNormLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings, every_nth_full, layer_types, windows_of


class Exaone4ForCausalLM(CausalLM):
    """Without `sliding_window` (the 1.2B) every layer sees everything, and has positions."""

    blocks = Blocks(layer=PostNormLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        settings = replace(DecoderSettings.from_info(info, norm_eps=1e-5), qk_norm="head_rms")
        if hf.get("sliding_window", 4096) is None:
            return settings
        types = layer_types(info, _pattern(info))
        return replace(
            settings,
            sliding_windows=windows_of(info, types, 4096),
            rope_types=tuple("" if kind == "sliding_attention" else NO_ROPE for kind in types),
        )


def _pattern(info: ModelInfo) -> list[str]:
    """`sliding_window_pattern`: every n-th layer, or a word such as LLLG that repeats; the last layer is full."""
    pattern = info.hf_config.get("sliding_window_pattern", 4)
    n = len(pattern) if isinstance(pattern, str) else int(pattern)
    return [*every_nth_full(info, n)[:-1], "full_attention"]
