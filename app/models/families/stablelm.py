"""StableLM: Llama with layer norms, partial rotation, and in some one norm for both blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.models.blocks import Blocks, layer_norm
from app.models.decoder import CausalLM
from app.models.decoder_layers.parallel import ParallelLayer
from app.models.decoder_settings import DecoderSettings


class StableLmForCausalLM(CausalLM):
    """`use_qkv_bias` covers query, key and value only."""

    blocks = Blocks(norm=layer_norm)
    rope_defaults = MappingProxyType({"partial_rotary_factor": 0.25})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        return replace(
            settings,
            head_dim=settings.hidden_size // settings.num_heads,
            qkv_bias=bool(info.hf_config.get("use_qkv_bias", False)),
            qk_norm="layer_norms_of_heads" if info.hf_config.get("qk_layernorm") else None,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Blocks beside each other where `use_parallel_residual` is on."""
        parallel = info.hf_config.get("use_parallel_residual", False)
        return replace(cls.blocks, layer=ParallelLayer) if parallel else cls.blocks

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Norms of heads under our names."""
        return [(re.sub(r"\.([qk])_layernorm\.", r".\1_norm.", name), tensor)]
