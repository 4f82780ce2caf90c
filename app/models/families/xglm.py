"""XGLM: BioGPT with sines and cosines as positions, which no checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.sinusoidal import SinusoidalPositions
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.families.biogpt import BioGptForCausalLM
from app.models.families.opt import FAIRSEQ_NAMES


def _positions(ctx: BuildContext, settings: DecoderSettings, empty_row: int) -> SinusoidalPositions:
    return SinusoidalPositions(settings.num_positions, settings.hidden_size, empty_row, ctx.dtype, ctx.device)


class XGLMForCausalLM(CausalLM):
    """A decoder alone, without attention to an encoder."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """BioGPT's. UnsupportedError for attention to another model."""
        if info.hf_config.get("add_cross_attention"):
            raise UnsupportedError("XGLM with add_cross_attention is not supported", param="model")
        return BioGptForCausalLM.settings(info)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """The padding token's number is that of a row of zeros."""
        row = int(info.hf_config.get("pad_token_id", 1))
        return Blocks(norm=layer_norm, mlp=plain_mlp, positions=partial(_positions, empty_row=row))

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """XGLM's names as ours."""
        return [] if ".embed_positions." in name else [(renamed(name, FAIRSEQ_NAMES), tensor)]
