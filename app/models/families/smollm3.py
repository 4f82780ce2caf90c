"""SmolLM 3: Llama whose every fourth layer knows no positions."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings, layer_types, rotating_layers, windows_of
from app.models.families.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(CausalLM):
    """Layers differ in their positions alone (`rotating_layers`)."""

    rope_defaults = MappingProxyType({"rope_theta": 2_000_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        turns = rotating_layers(info)
        slides = bool(hf.get("use_sliding_window", False))
        types = layer_types(info, ["sliding_attention" if slides and not one else "full_attention" for one in turns])
        return replace(
            LlamaForCausalLM.settings(info),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
            rope_types=tuple("" if one else NO_ROPE for one in turns),
            sliding_windows=windows_of(info, types) if slides else (None,) * info.num_layers,
        )
