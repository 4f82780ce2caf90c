"""Gemma 4 with pictures and sounds: patches of any shape that rotate by column and row, pooled in squares; in the
larger models the tokens of a picture see each other in layers with a window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule
from app.errors import CheckpointError
from app.kernels.attention.encoder import plan_encoder
from app.kernels.fused.reference import rotate
from app.layers.activation import activation
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight
from app.models.families.gemma4 import Gemma4ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel, Picture
from app.models.multimodal.clipped_linear import BOUNDS, ClippedLinear
from app.models.multimodal.gemma_sound import Gemma4Ears
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import PatchEmbedding, Span, patches_of

GEMMA4 = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12},
    **{"num_key_value_heads": 12, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
    **{"pooling_kernel_size": 3, "patch_size": 16, "position_embedding_size": 10_240},
}
THETA = 100.0
Grid = tuple[int, int, int]


class Gemma4Block(Layer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); queries, keys and values are normed by head."""

    def __init__(self, ctx: BuildContext, v: VisionConfig) -> None:
        super().__init__()
        size, inner, clips = v.whole("hidden_size"), v.whole("intermediate_size"), v.flag("use_clipped_linears")
        self.eps, self.head_dim = v.number("rms_norm_eps"), v.whole("head_dim")
        queries, keys = (v.whole(name) * self.head_dim for name in ("num_attention_heads", "num_key_value_heads"))
        self.q_proj = ClippedLinear(ctx, size, queries, clips)
        self.k_proj, self.v_proj = (ClippedLinear(ctx, size, keys, clips) for _ in range(2))
        self.o_proj = ClippedLinear(ctx, queries, size, clips)
        self.q_norm, self.k_norm = (RMSNorm(ctx, self.head_dim, self.eps) for _ in range(2))
        self.gate_proj, self.up_proj = (ClippedLinear(ctx, size, inner, clips) for _ in range(2))
        self.down_proj = ClippedLinear(ctx, inner, size, clips)
        self.act = activation(v.text("hidden_activation"))
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(ctx, size, self.eps) for _ in range(2))
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            RMSNorm(ctx, size, self.eps) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = x + self.post_attention_layernorm(self._attend(self.input_layernorm(x), span))
        normed = self.pre_feedforward_layernorm(x)
        mlp = self.down_proj(self.act(self.gate_proj(normed)) * self.up_proj(normed))
        return x + self.post_feedforward_layernorm(mlp)  # type: ignore[no-any-return]

    def _attend(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        shape = len(x), -1, self.head_dim
        query, key, value = (project(x).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = _rotated(self.q_norm(query), span), _rotated(self.k_norm(key), span)
        value = F.rms_norm(value, (self.head_dim,), None, self.eps)
        return self.o_proj(span.plan.attend(query, key, value, 1.0).flatten(1))  # type: ignore[no-any-return]


def _rotated(heads: torch.Tensor, span: Span) -> torch.Tensor:
    """The first half of each head [T, H, D] by the column, the second by the row."""
    assert span.cos is not None
    assert span.sin is not None
    halves = heads.view(*heads.shape[:2], 2, -1)
    return rotate(halves, span.cos, span.sin).flatten(2)


class Gemma4Encoder(MediaEncoder):
    """Patches of each picture see each other; the mean of each square is a token, normed and projected."""

    rules: ClassVar[Sequence[Rule]] = (
        (r"^vision_tower\.", ""),
        (r"^patch_embedder\.input_proj\.", "patch_embed."),
        (r"^patch_embedder\.position_embedding_table$", "positions"),
        (r"^encoder\.layers\.", "blocks."),
        (r"\.(self_attn|mlp)\.", "."),
        (r"^embed_vision\.embedding_projection\.", "projection."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        v = VisionConfig(info, GEMMA4)
        size, self.patch, self.merge = v.whole("hidden_size"), v.side("patch_size"), v.whole("pooling_kernel_size")
        self.size, self.head_dim, self.eps = size, v.whole("head_dim"), v.number("rms_norm_eps")
        if self.head_dim % 4 or v.whole("num_attention_heads") % v.whole("num_key_value_heads"):
            raise CheckpointError(f"{info.directory}: vision_config: heads of {self.head_dim}", param="model")
        self.dtype, self.device = ctx.dtype, ctx.device
        self.normalization = Normalization(HALF, HALF)  # its own, whatever the files say
        self.patch_embed = PatchEmbedding(ctx, size, (3 * self.patch**2,), bias=False)
        table = 2, v.whole("position_embedding_size"), size
        self.positions = Weight(torch.empty(*table, dtype=ctx.dtype), REPLICATED)
        self.blocks = nn.ModuleList(Gemma4Block(ctx, v) for _ in range(v.whole("num_hidden_layers")))
        self.std_bias = self.std_scale = None
        if v.flag("standardize"):
            self.std_bias, self.std_scale = (Weight(torch.empty(size, dtype=ctx.dtype), REPLICATED) for _ in range(2))
        self.projection = ReplicatedLinear(ctx, size, info.hidden_size, bias=False)

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return grid[1] * grid[2] // self.merge**2

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        side = max(1, min(int(num_tokens**0.5), self.positions.shape[1] // self.merge)) * self.merge
        shape = (1, 3, side * self.patch, side * self.patch)
        return Picture(torch.zeros(shape, dtype=torch.uint8, device=self.device), (1, side, side))

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        grids = [picture.grid for picture in pictures]
        patches = torch.cat([patches_of(picture.pixels, self.patch) for picture in pictures]).permute(0, 2, 3, 1)
        places = torch.cat([_places(grid) for grid in grids]).to(self.device)  # [T, 2], column and row
        x = self.patch_embed(self.normalization.apply(patches, 3, self.dtype))
        x = x + self.positions[0].index_select(0, places[:, 0]) + self.positions[1].index_select(0, places[:, 1])
        lengths = [rows * columns for _, rows, columns in grids]
        span = Span(plan_encoder([0, *accumulate(lengths)], x.device), *self._angles(places))
        for block in self.blocks:
            x = block(x, span)
        pooled = torch.cat([self._pooled(own, grid) for own, grid in zip(x.split(lengths), grids, strict=True)])
        if self.std_bias is not None and self.std_scale is not None:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        normed = F.rms_norm(pooled.to(self.dtype), (self.size,), None, self.eps)
        return self.projection(normed).unsqueeze(0)  # type: ignore[no-any-return]

    def _pooled(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Patches [T, E] of a picture -> the means of squares, scaled, fp32."""
        _, rows, columns = grid
        cut = x.float().view(rows // self.merge, self.merge, columns // self.merge, self.merge, self.size)
        means = cut.mean((1, 3)).flatten(0, 1).to(self.dtype)
        scaled: torch.Tensor = means.float() * self.size**0.5
        return scaled

    def _angles(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, 2, D / 2], by column and by row."""
        half = self.head_dim // 2
        inverse = 1.0 / THETA ** (torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half)
        angles = places[:, :, None].float() * inverse
        cos, sin = angles.cos(), angles.sin()
        both = torch.cat((cos, cos), 2), torch.cat((-sin, sin), 2)
        return both[0].unsqueeze(1).to(self.dtype), both[1].unsqueeze(1).to(self.dtype)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; bounds are stored as numbers, not as tensors of one. What hears is left out."""
        if name.startswith(("audio_tower.", "embed_audio.")):
            return
        for own, stored in super().own_tensors(name, tensor):
            yield own, stored.reshaped(1) if own.endswith(BOUNDS) else stored


def _places(grid: Grid) -> torch.Tensor:
    """Column and row of each patch, int64 [T, 2]."""
    rows, columns = torch.meshgrid(torch.arange(grid[1]), torch.arange(grid[2]), indexing="ij")
    return torch.stack((columns.flatten(), rows.flatten()), 1)


class Gemma4ForConditionalGeneration(MediaModel, Gemma4ForCausalLM):
    """Gemma 4; of a checkpoint without an encoder, its text. Layers' own embeddings of a picture's tokens are those of
    the padding token."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.seen_both_ways = self.media is not None and self.media.whole_tokens > 0

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Gemma4Encoder(ctx, info)

    @classmethod
    def ears_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder | None:
        """See SeeingModel; the larger ones hear nothing."""
        return Gemma4Ears(ctx, info) if isinstance(info.hf_config.get("audio_config"), dict) else None
