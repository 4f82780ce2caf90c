"""StableLM: Llama with layer norms, partial rotation, and in some one norm for both blocks."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from app.engine.model_info import ModelInfo
from app.engine.models.blocks import Blocks, layer_norm
from app.engine.models.decoder import CausalLM
from app.engine.models.decoder_layers.parallel import ParallelLayer
from app.engine.models.decoder_settings import DecoderSettings
from app.errors import UnsupportedError


class StableLmForCausalLM(CausalLM):
    """`use_qkv_bias` covers query, key and value only."""

    blocks = Blocks(norm=layer_norm)
    rope_defaults = MappingProxyType({"partial_rotary_factor": 0.25})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for norms of heads, which are stored head by head."""
        if info.hf_config.get("qk_layernorm"):
            raise UnsupportedError("StableLM with qk_layernorm=True is not supported", param="model")
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        head_dim = settings.hidden_size // settings.num_heads
        return replace(settings, head_dim=head_dim, qkv_bias=bool(info.hf_config.get("use_qkv_bias", False)))

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Blocks beside each other where `use_parallel_residual` is on."""
        parallel = info.hf_config.get("use_parallel_residual", False)
        return replace(cls.blocks, layer=ParallelLayer) if parallel else cls.blocks
