"""Granite 4: Mamba 2 with attention in some layers, which know no positions; experts, or a feed-forward layer alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.checkpoints.tensors.tensor_view import split_rows
from app.layers.context import BuildContext
from app.models.blocks import Blocks, grouped_query_attention
from app.models.decoder import CausalLM
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.families.granite import GraniteForCausalLM
from app.models.families.granite_moe import GraniteMoeForCausalLM
from app.models.mixers import FULL, LINEAR, ByKind, kinds_of, mamba2_mixer, mamba2_settings, mamba2_tensors

_SHARED = ".mlp.shared_experts."


class GraniteMoeHybridForCausalLM(CausalLM):
    """Four scales, as its elders; `position_embedding_type: rope` turns the heads of attention."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.mamba = mamba2_settings(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        mamba2_settings(info)
        settings = replace(GraniteForCausalLM.settings(info), mlp_bias=False)
        if info.num_experts:
            settings = GraniteMoeForCausalLM.settings(info)
        else:
            settings = replace(settings, intermediate_size=int(hf.get("shared_intermediate_size", 1024)))
        turns = hf.get("position_embedding_type") == "rope"
        return replace(settings, rope_types=() if turns else (NO_ROPE,) * info.num_layers)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        mixers = {LINEAR: mamba2_mixer(mamba2_settings(info)), FULL: grouped_query_attention}
        return Blocks(attention=ByKind(kinds_of(info, [LINEAR] * info.num_layers), mixers))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Names of Granite with experts; without, what all tokens go through is the feed-forward layer."""
        own = renamed(name, [(r"\.mamba\.", ".self_attn.")])
        settings = self.decoder_settings
        if settings.experts is not None:
            for part, one in GraniteMoeForCausalLM.tensors(settings, own, tensor):
                yield from mamba2_tensors(self.mamba, part, one)
            return
        head, found, leaf = own.rpartition(".shared_mlp.input_linear.")
        if found:
            sizes = dict.fromkeys(("gate_proj", "up_proj"), settings.intermediate_size)
            yield from ((f"{head}.mlp.{part}.{leaf}", one) for part, one in split_rows(tensor, sizes))
            return
        yield from mamba2_tensors(self.mamba, own.replace(".shared_mlp.output_linear.", ".mlp.down_proj."), tensor)
