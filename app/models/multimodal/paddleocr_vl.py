"""PaddleOCR-VL: SigLIP's layers for grids of any size, which rotate, too, over ERNIE 4.5 with sections of positions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.layers.context import BuildContext
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedTable
from app.models.decoder import Ropes
from app.models.decoder_settings import DecoderSettings
from app.models.families.ernie4_5 import Ernie4_5ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen_vision import GridVision, PatchMerger, heads_of, with_sections
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, Normalization, VisionConfig
from app.models.multimodal.vision_layers import PatchEmbedding, PlainBlock, VisionAttention, VisionBlock

PADDLE_OCR = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"image_size": 384, "patch_size": 14, "spatial_merge_size": 2},
    **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
SECTIONS = (16, 24, 24)


class PaddleOcrVision(GridVision):
    """See the head of this file."""

    rules = (
        (r"^(visual\.)?vision_model\.", ""),
        (r"^embeddings\.patch_embedding\.", "patch_embed."),
        (r"^embeddings\.position_embedding\.", "pos_embed."),
        (r"^encoder\.layers\.", "blocks."),
        (r"\.layer_norm(\d)\.", r".norm\1."),
        (r"\.self_attn\.", ".attn."),
        (r"\.attn\.out_proj\.", ".attn.o_proj."),
        (r"^(mlp_AR|projector)\.pre_norm\.", "merger.norm."),
        (r"^(mlp_AR|projector)\.linear_(\d)\.", r"merger.mlp.fc\2."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        v = VisionConfig(info, PADDLE_OCR)
        size, heads, eps = v.whole("hidden_size"), v.whole("num_attention_heads"), v.number("layer_norm_eps")
        self.size, self.head_dim, self.dtype, self.device = size, heads_of(size, heads, info), ctx.dtype, ctx.device
        self.patch, self.merge, act = v.side("patch_size"), v.whole("spatial_merge_size"), v.text("hidden_act")
        self.side = v.side("image_size") // self.patch
        self.normalization = Normalization.of(info, CLIP_MEAN, CLIP_STD)
        self.patch_embed = PatchEmbedding(ctx, size, (3, self.patch, self.patch), bias=True)
        self.pos_embed = ReplicatedTable(ctx, self.side**2, size)
        self.blocks = nn.ModuleList(
            VisionBlock(
                (LayerNorm(ctx, size, eps), LayerNorm(ctx, size, eps)),
                VisionAttention(ctx, size, heads),
                PlainBlock(ctx, size, v.whole("intermediate_size"), act),
            )
            for _ in range(v.whole("num_hidden_layers"))
        )
        self.post_layernorm, norm = LayerNorm(ctx, size, eps), LayerNorm(ctx, size, 1e-5)
        self.merger = PatchMerger(ctx, norm, size, size * self.merge**2, info.hidden_size, norms_merged=False)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """See GridVision."""
        return self.merger(self.post_layernorm(x))  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; what nobody runs is left out: a head, and positions of another kind."""
        own = list(super().own_tensors(name, tensor))
        return [] if own[0][0].startswith(("head.", "embeddings.")) else own


class PaddleOCRVLForConditionalGeneration(MediaModel, Ernie4_5ForCausalLM):
    """Heads turn by halves, as Llama's."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return PaddleOcrVision(ctx, info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM."""
        return with_sections(info, super().ropes(info, settings, max_model_len), SECTIONS)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See CausalLM."""
        return [(name, tensor)]
