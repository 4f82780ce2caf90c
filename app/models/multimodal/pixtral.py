"""Pixtral's tower, which takes pictures of any size, and Mistral 3, which merges its patches four to a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.names import Rule
from app.errors import CheckpointError
from app.kernels.attention.encoder import plan_encoder
from app.layers.context import BuildContext
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.models.families.ministral import Ministral3ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel, Picture
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, Normalization, VisionConfig
from app.models.multimodal.vision_layers import (
    GatedBlock,
    PatchEmbedding,
    PlainBlock,
    Span,
    VisionAttention,
    VisionBlock,
    patches_of,
)

EPS = 1e-5
PIXTRAL = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"patch_size": 16, "hidden_act": "gelu", "rope_theta": 10_000.0},
}
Grid = tuple[int, int, int]


class PixtralEncoder(MediaEncoder):
    """Patches of each picture see each other; they rotate by row and column in turn of frequencies."""

    rules: ClassVar[Sequence[Rule]] = (
        (r"^vision_(tower|encoder)\.", ""),
        (r"^patch_conv\.", "patch_embed."),
        (r"^transformer\.layers\.", "blocks."),
        (r"\.attention_norm\.", ".norm1."),
        (r"\.ffn_norm\.", ".norm2."),
        (r"\.attention\.", ".attn."),
        (r"\.feed_forward\.", ".mlp."),
    )
    merge: int = 1

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        v = VisionConfig(info, PIXTRAL)
        self.size, self.patch, heads = v.whole("hidden_size"), v.side("patch_size"), v.whole("num_attention_heads")
        size, self.head_dim = self.size, self.size // heads
        if self.head_dim * heads != size or self.head_dim % 4:
            raise CheckpointError(f"{info.directory}: vision_config: {heads} heads of {size}", param="model")
        self.theta, self.dtype, self.device = v.number("rope_theta"), ctx.dtype, ctx.device
        self.normalization = Normalization.of(info, CLIP_MEAN, CLIP_STD)
        self.patch_embed = PatchEmbedding(ctx, size, (3, self.patch, self.patch), bias=False)
        self.ln_pre = RMSNorm(ctx, size, EPS)
        self.blocks = nn.ModuleList(
            VisionBlock(
                (RMSNorm(ctx, size, EPS), RMSNorm(ctx, size, EPS)),
                VisionAttention(ctx, size, heads, bias=False, output_bias=False),
                GatedBlock(ctx, size, v.whole("intermediate_size"), v.text("hidden_act"), bias=False),
            )
            for _ in range(v.whole("num_hidden_layers"))
        )

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return grid[0] * (grid[1] // self.merge) * (grid[2] // self.merge)

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        side = max(1, int(num_tokens**0.5)) * self.merge
        shape = (1, 3, side * self.patch, side * self.patch)
        return Picture(torch.zeros(shape, dtype=torch.uint8, device=self.device), (1, side, side))

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        grids = [picture.grid for picture in pictures]
        patches = torch.cat([patches_of(picture.pixels, self.patch) for picture in pictures])
        x = self.ln_pre(self.patch_embed(self.normalization.apply(patches, 1, self.dtype)))
        starts = [0]
        for _, rows, columns in grids:
            starts.append(starts[-1] + rows * columns)
        cos, sin = (torch.cat(one) for one in zip(*map(self._angles, grids), strict=True))
        span = Span(plan_encoder(starts, x.device), cos, sin)
        for block in self.blocks:
            x = block(x, span)
        return self.project(x, grids).unsqueeze(0)

    def project(self, hidden: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Patches [T, E] of pictures -> tokens [T', C]."""
        raise NotImplementedError

    def _angles(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = (places.flatten() for places in torch.meshgrid(
            torch.arange(grid[1]), torch.arange(grid[2]), indexing="ij"
        ))  # fmt: skip
        inverse = 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        angles = torch.cat((torch.outer(rows.float(), inverse[0::2]), torch.outer(columns.float(), inverse[1::2])), 1)
        cos, sin = angles.cos(), angles.sin()
        both = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        return both[0].unsqueeze(1).to(self.device, self.dtype), both[1].unsqueeze(1).to(self.device, self.dtype)


class Mistral3Encoder(PixtralEncoder):
    """Normed patches of a square become one, then two linear layers."""

    rules = (
        *PixtralEncoder.rules,
        (r"^multi_modal_projector\.norm\.", "merge_norm."),
        (r"^multi_modal_projector\.patch_merger\.merging_layer\.", "merging."),
        (r"^multi_modal_projector\.linear_(\d)\.", r"projector.fc\1."),
    )

    text_eps: ClassVar[float] = 1e-5  # of the text's norms where config.json says none

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        defaults = {"spatial_merge_size": 2, "projector_hidden_act": "gelu", "multimodal_projector_bias": False}
        model = VisionConfig.of_model(info, defaults)
        self.merge = model.whole("spatial_merge_size")
        eps = float(info.hf_config.get("rms_norm_eps", self.text_eps))
        self.merge_norm = RMSNorm(ctx, self.size, eps)
        self.merging = ReplicatedLinear(ctx, self.size * self.merge**2, self.size, bias=False)
        act, bias = model.text("projector_hidden_act"), model.flag("multimodal_projector_bias")
        self.projector = PlainBlock(ctx, self.size, info.hidden_size, act, out=info.hidden_size, bias=bias)

    def project(self, hidden: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """See PixtralEncoder: a square's numbers lie channel by channel."""
        parts = self.merge_norm(hidden).split([rows * columns for _, rows, columns in grids])
        cut = [
            part.view(rows // self.merge, self.merge, columns // self.merge, self.merge, self.size)
            for part, (_, rows, columns) in zip(parts, grids, strict=True)
        ]
        squares = torch.cat([part.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1) for part in cut])
        return self.projector(self.merging(squares))  # type: ignore[no-any-return]


class Mistral3ForConditionalGeneration(MediaModel, Ministral3ForCausalLM):
    """Mistral Small 3.1 and Ministral 3 with pictures."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Mistral3Encoder(ctx, info)
