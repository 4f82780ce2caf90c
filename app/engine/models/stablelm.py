"""StableLM: Llama with layer norms, partial rotation, and in some one norm for both blocks."""

from __future__ import annotations

from dataclasses import replace

from app.engine.layers.rope_scaling import RopeSettings
from app.engine.model_info import ModelInfo
from app.engine.models.blocks import Blocks, layer_norm
from app.engine.models.decoder import CausalLM, Ropes
from app.engine.models.decoder_layers.parallel import ParallelLayer
from app.engine.models.decoder_settings import DecoderSettings
from app.errors import UnsupportedError


class StableLmForCausalLM(CausalLM):
    """`use_qkv_bias` covers query, key and value only."""

    blocks = Blocks(norm=layer_norm)

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

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """A quarter of a head turns, where config.json does not say."""
        hf = {"partial_rotary_factor": 0.25} | info.hf_config
        return lambda layer_type: RopeSettings.from_hf(hf, settings.head_dim, max_model_len, layer_type)
