"""Mamba, FalconMamba and Mamba 2: layers of one block, without attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.mamba import InnerNorms, Mamba, MambaSettings
from app.layers.mamba2 import Mamba2Settings
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder import CausalLM
from app.models.decoder_layers.one_block import OneBlockLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.mixers import checked, dt_limit, mamba2_mixer, mamba2_tensors, mamba_tensors

BACKBONE_NAMES: list[Rule] = [
    (r"^backbone\.", "model."),
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.embedding\.", "model.embed_tokens."),  # as first published
    (r"^model\.norm_f\.", "model.norm."),
    (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
]


class MambaForCausalLM(CausalLM):
    """Layers of Mamba 1."""

    inner_norms: ClassVar[InnerNorms] = "none"

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.channels = info.intermediate_size

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        settings = DecoderSettings.from_info(info, tied=True, norm_eps=1e-5)
        return replace(settings, rope_types=(NO_ROPE,) * info.num_layers)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Mamba in every layer."""
        hf = info.hf_config
        rank = hf.get("time_step_rank", "auto")
        settings = MambaSettings(
            channels=info.intermediate_size,
            state_size=int(hf.get("state_size", 16)),
            dt_rank=math.ceil(info.hidden_size / 16) if rank == "auto" else int(rank),
            conv_width=int(hf.get("conv_kernel", 4)),
            conv_bias=bool(hf.get("use_conv_bias", True)),
            bias=bool(hf.get("use_bias", False)),
            inner_norms=cls.inner_norms,
            norm_eps=float(hf.get("mixer_rms_eps", 1e-6)),
        )

        def mixer(ctx: BuildContext, decoder: DecoderSettings, place: LayerPlace) -> AttentionLayer:
            return Mamba(ctx, decoder.hidden_size, settings, place.cache_index)

        return Blocks(attention=mixer, layer=OneBlockLayer)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names, and the parts of the projection."""
        return mamba_tensors(self.channels, renamed(name, BACKBONE_NAMES), tensor)


class FalconMambaForCausalLM(MambaForCausalLM):
    """Mamba whose dt, B and C are normed."""

    inner_norms = "unit"


def _mamba2(info: ModelInfo) -> Mamba2Settings:
    hf = info.hf_config
    return checked(
        Mamba2Settings(
            num_heads=int(hf.get("num_heads", 128)),
            head_dim=int(hf.get("head_dim", 64)),
            num_groups=int(hf.get("n_groups", 8)),
            state_size=int(hf.get("state_size", 128)),
            conv_width=int(hf.get("conv_kernel", 4)),
            conv_bias=bool(hf.get("use_conv_bias", True)),
            bias=bool(hf.get("use_bias", False)),
            norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            norm_groups=1,
            dt_limit=dt_limit(hf.get("time_step_limit")),
        ),
        info,
    )


class Mamba2ForCausalLM(CausalLM):
    """Layers of Mamba 2."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.mamba = _mamba2(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        _mamba2(info)
        return replace(DecoderSettings.from_info(info, norm_eps=1e-5), rope_types=(NO_ROPE,) * info.num_layers)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Mamba 2 in every layer."""
        return Blocks(attention=mamba2_mixer(_mamba2(info)), layer=OneBlockLayer)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names, and the parts of the projection."""
        return mamba2_tensors(self.mamba, renamed(name, BACKBONE_NAMES), tensor)
