"""Kimi-VL and Kimi K2.5 with pictures: MoonViT (Kimi Team, 2025), whose learned positions are stretched over grids of
any size, over DeepSeek V3's layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import computed
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.layer_norm import LayerNorm
from app.layers.weight import REPLICATED, Weight
from app.models.families.deepseek import DeepseekV3ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel
from app.models.multimodal.qwen_vision import Grid, GridTables, GridVision, PatchMerger, heads_of, stretched
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import FusedAttention, PatchEmbedding, PlainBlock, VisionBlock

MOON_VIT = {
    **{"patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64, "merge_kernel_size": 2},
    **{"num_attention_heads": 16, "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304},
}
EPS = 1e-5


class MoonVision(GridVision):
    """See the head of this file."""

    rules = (
        (r"^vision_tower\.", ""),
        (r"^encoder\.(blocks|final_layernorm)\.", r"\1."),
        (r"^patch_embed\.proj\.", "patch_embed."),
        (r"^patch_embed\.pos_emb\.weight$", "positions"),
        (r"\.norm1\.", ".norm2."),
        (r"\.norm0\.", ".norm1."),
        (r"\.mlp\.fc1\.", ".mlp.fc2."),
        (r"\.mlp\.fc0\.", ".mlp.fc1."),
        (r"\.wqkv\.", ".attn.qkv."),
        (r"\.wo\.", ".attn.proj."),
        (r"^(mm_projector|multi_modal_projector)\.pre_norm\.", "merger.norm."),
        (r"^multi_modal_projector\.linear_(\d)\.", r"merger.mlp.fc\1."),
        (r"^mm_projector\.proj\.0\.", "merger.mlp.fc1."),
        (r"^mm_projector\.proj\.2\.", "merger.mlp.fc2."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        v = VisionConfig(info, MOON_VIT)
        size, heads = v.whole("vt_hidden_size", "hidden_size"), v.whole("vt_num_attention_heads", "num_attention_heads")
        self.size, self.head_dim, self.dtype, self.device = size, heads_of(size, heads, info), ctx.dtype, ctx.device
        self.patch, self.merge = v.side("patch_size"), v.side("merge_kernel_size")
        self.normalization = Normalization.of(info, HALF, HALF)
        self.patch_embed = PatchEmbedding(ctx, size, (3, self.patch, self.patch), bias=True)
        height = v.whole("pos_emb_height", "init_pos_emb_height")
        width = v.whole("pos_emb_width", "init_pos_emb_width")
        self.positions = Weight(torch.empty(height, width, size, dtype=ctx.dtype), REPLICATED)
        inner = v.whole("vt_intermediate_size", "intermediate_size")
        self.blocks = nn.ModuleList(
            VisionBlock(
                (LayerNorm(ctx, size, EPS), LayerNorm(ctx, size, EPS)),
                FusedAttention(ctx, size, heads),
                PlainBlock(ctx, size, inner, "gelu_pytorch_tanh"),
            )
            for _ in range(v.whole("vt_num_hidden_layers", "num_hidden_layers"))
        )
        self.final_layernorm, norm = LayerNorm(ctx, size, EPS), LayerNorm(ctx, size, EPS)
        self.merger = PatchMerger(ctx, norm, size, size * self.merge**2, info.hidden_size, norms_merged=False)

    def placed(self, table: GridTables, grid: Grid) -> torch.Tensor:
        """See GridVision."""
        return stretched(self.positions, grid, self.merge)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """See GridVision."""
        return self.merger(self.final_layernorm(x))  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder."""
        for own, stored in super().own_tensors(name, tensor):
            yield own, computed(stored, self._by_axis) if ".attn.qkv." in own else stored

    def _by_axis(self, qkv: torch.Tensor) -> torch.Tensor:
        """Queries and keys whose dimensions rotate in pairs, by column and row in turn, as GridVision rotates: the
        first of all pairs before the second, in each those of rows first. The scores stay the same."""
        if len(qkv) != 3 * self.size:
            raise CheckpointError(f"wqkv has {len(qkv)} rows, not {3 * self.size}", param="model")
        turning = qkv[: 2 * self.size].reshape(-1, self.head_dim // 4, 2, 2, *qkv.shape[1:])
        turned = turning.flip(2).transpose(1, 3).reshape(2 * self.size, *qkv.shape[1:])
        return torch.cat((turned, qkv[2 * self.size :]))


class KimiForConditionalGeneration(MediaModel, DeepseekV3ForCausalLM):
    """Kimi-VL, K2.5 and K2.6."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return MoonVision(ctx, info)
