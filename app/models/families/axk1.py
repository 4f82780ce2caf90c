"""A.X K1: DeepSeek-V3 with a norm behind the experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import DecoderSettings
from app.models.families.deepseek import expert_settings
from app.models.latent import LatentCausalLM, latent_attention

_DEFAULTS = {
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
}


class NormedExpertsLayer(PreNormLayer):
    """Puts what experts give through a norm before it is added."""

    narrows = True

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__(ctx, settings, place, blocks)
        has_experts = settings.experts is not None and place.index in settings.experts.layers
        self.post_mlp_layernorm = blocks.norm(ctx, settings, False) if has_experts else None

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        normed, x = self.self_attn(normed, AddNorm(x, self.post_attention_layernorm).of(ctx.read), ctx)
        add = AddNorm(x, next_norm, first=self.post_mlp_layernorm)
        return self.mlp(normed, add, ctx.behind())  # type: ignore[no-any-return]


class AXK1ForCausalLM(LatentCausalLM):
    """519B-A33B."""

    blocks = Blocks(attention=latent_attention, layer=NormedExpertsLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(LatentCausalLM.settings(info), experts=expert_settings(info, _DEFAULTS))

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The norm as published, a part of the layer, and as transformers calls it."""
        own = renamed(name, [(r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm.")])
        return LatentCausalLM.tensors(settings, own, tensor)
