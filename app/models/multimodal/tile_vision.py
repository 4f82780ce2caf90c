"""Encoders of square tiles of one size: CLIP (Radford et al., 2021), SigLIP (Zhai et al., 2023) and InternViT."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.errors import CheckpointError
from app.kernels.attention.encoder import EncoderPlan, plan_encoder
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.norm import Norm, RMSNorm
from app.layers.weight import REPLICATED, Weight
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.vision_config import Normalization, VisionConfig
from app.models.multimodal.vision_layers import (
    PatchEmbedding,
    PlainBlock,
    Span,
    VisionAttention,
    VisionBlock,
    patches_of,
)

CLIP = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
SIGLIP = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
TOWER: Sequence[Rule] = (
    (r"^vision_(tower|model)\.(vision_model\.)?", "tower."),
    (r"^tower\.embeddings\.(class_embedding|cls_token)$", "tower.class_token"),
    (r"^tower\.embeddings\.(patch_embedding|patch_embeddings\.projection)\.", "tower.patch_embed."),
    (r"^tower\.embeddings\.(position_embedding\.weight|position_embeddings)$", "tower.positions"),
    (r"^tower\.pre_layrnorm\.", "tower.pre_norm."),
    (r"^tower\.(post_layernorm|layernorm)\.", "tower.post_norm."),
    (r"^tower\.encoder\.layers?\.", "tower.blocks."),
    (r"\.(layer_norm1|layernorm_before)\.", ".norm1."),
    (r"\.(layer_norm2|layernorm_after)\.", ".norm2."),
    (r"\.(self_attn|attention)\.", ".attn."),
    (r"\.attn\.(out_proj|projection_layer)\.", ".attn.o_proj."),
    (r"\.lambda_(\d)$", r".scale\1"),
)


@dataclass(slots=True, frozen=True)
class TileSettings:
    """Says what a kind of tower has beside the sizes of its `vision_config`."""

    depth: int  # layers that are run
    has_class: bool = False  # a token before the patches
    patch_bias: bool = True
    pre_norm: bool = False
    post_norm: bool = False
    scales: bool = False  # each sum is of a scaled block
    rms: bool = False  # norms in blocks
    attention_bias: bool = True
    norms_queries: bool = False  # and keys, over all heads
    taken: tuple[int, ...] = ()  # of how many layers hidden states are given, side by side; (): of all that are run


class ScaledBlock(VisionBlock):
    """x + scale * attention(norm(x)), then the same with the feed-forward block."""

    def __init__(self, ctx: BuildContext, size: int, norms: tuple[Norm, Norm], attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__(norms, attn, mlp)
        self.scale1, self.scale2 = (Weight(torch.empty(size, dtype=ctx.dtype), REPLICATED) for _ in range(2))

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = x + self.scale1 * self.attn(self.norm1(x), span)
        return x + self.scale2 * self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class NormedAttention(VisionAttention):
    """Queries and keys are normed, all heads at once."""

    def __init__(self, ctx: BuildContext, size: int, num_heads: int, *, bias: bool) -> None:
        super().__init__(ctx, size, num_heads, bias=bias)
        self.q_norm, self.k_norm = (RMSNorm(ctx, size, 1e-6) for _ in range(2))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See VisionAttention."""
        query, key, value = super().project(x)
        return self.q_norm(query), self.k_norm(key), value


class TileVision(Layer):
    """Tiles [n, 3, H, W] -> hidden states of their patches, `width` numbers each."""

    def __init__(self, ctx: BuildContext, v: VisionConfig, settings: TileSettings) -> None:
        super().__init__()
        s = settings
        self.size, self.side, self.patch = v.whole("hidden_size"), v.side("image_size"), v.side("patch_size")
        size, heads, eps = self.size, v.whole("num_attention_heads"), v.number("layer_norm_eps")
        if size % heads or self.side < self.patch:
            raise CheckpointError(f"vision_config: {heads} heads of {size}, {self.patch} of {self.side}", param="model")
        count = (self.side // self.patch) ** 2
        self.patch_embed = PatchEmbedding(ctx, size, (3, self.patch, self.patch), bias=s.patch_bias)
        self.class_token = Weight(torch.empty(size, dtype=ctx.dtype), REPLICATED) if s.has_class else None
        self.positions = Weight(torch.empty(count + s.has_class, size, dtype=ctx.dtype), REPLICATED)

        def norm() -> Norm:
            return RMSNorm(ctx, size, eps) if s.rms else LayerNorm(ctx, size, eps)

        def block() -> VisionBlock:
            kind = NormedAttention if s.norms_queries else VisionAttention
            attention = kind(ctx, size, heads, bias=s.attention_bias)
            mlp = PlainBlock(ctx, size, v.whole("intermediate_size"), v.text("hidden_act"))
            norms = norm(), norm()
            return ScaledBlock(ctx, size, norms, attention, mlp) if s.scales else VisionBlock(norms, attention, mlp)

        self.head_dim = size // heads
        self._taken = s.taken or (s.depth,)
        self.width = size * len(self._taken)
        self._plans: dict[int, EncoderPlan] = {}  # by tiles, which a step's memory bounds
        self.pre_norm = norm() if s.pre_norm else None
        self.blocks = nn.ModuleList(block() for _ in range(s.depth))
        self.post_norm = LayerNorm(ctx, size, eps) if s.post_norm else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, side, side] -> [n, L, C], the token before the patches left out."""
        x = self.all_tokens(pixels)
        return x if self.class_token is None else x[:, 1:]

    def plan(self, count: int, length: int, device: torch.device) -> EncoderPlan:
        """Plans what patches see of each other, of so many tiles of as many tokens each."""
        if count not in self._plans:
            self._plans[count] = plan_encoder(list(range(0, count * length + 1, length)), device)
        return self._plans[count]

    def all_tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, side, side] -> [n, L, C], what stands before the patches first."""
        x = self.patch_embed(patches_of(pixels, self.patch)).view(len(pixels), -1, self.size)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)
        x = x + self.positions
        length = x.shape[1]
        x = x.flatten(0, 1)
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        return self.through(x, Span(self.plan(len(pixels), length, x.device))).view(-1, length, self.width)

    def through(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """Embedded patches [T, C] -> hidden states [T, width]."""
        found = {0: x} if 0 in self._taken else {}
        for depth, block in enumerate(self.blocks, 1):
            x = block(x, span)
            if depth in self._taken:
                found[depth] = x
        if len(self._taken) > 1:
            x = torch.cat([found[depth] for depth in self._taken], dim=-1)
        if self.post_norm is not None:
            x = self.post_norm(x)
        return x


class TileEncoder(MediaEncoder):
    """A tower of square tiles and what makes tokens of its patches."""

    tower: TileVision
    merge: int = 1  # patches along each side of a token
    is_capturable = True

    def __init__(self, ctx: BuildContext, normalization: Normalization) -> None:
        super().__init__()
        self.dtype, self.device, self.normalization = ctx.dtype, ctx.device, normalization

    @property
    def tokens_each(self) -> int:
        """Tokens of a tile."""
        return (self.tower.side // self.tower.patch // self.merge) ** 2

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """See MediaEncoder: all tiles of an item."""
        return grid[0] * self.tokens_each

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder: as many tiles as there may be."""
        tiles, side = max(1, num_tokens // self.tokens_each), self.tower.side
        pixels = torch.zeros(tiles, 3, side, side, dtype=torch.uint8, device=self.device)
        return Picture(pixels, (tiles, side // self.tower.patch, side // self.tower.patch))

    def constants(self, grid: tuple[int, int, int]) -> object:
        """See MediaEncoder."""
        return self.tower.plan(grid[0], len(self.tower.positions), self.device)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        pixels = torch.cat([picture.pixels for picture in pictures])
        hidden = self.tower(self.normalization.apply(pixels, 1, self.dtype))
        return self.project(hidden).flatten(0, 1).unsqueeze(0)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Patches [n, L, E] -> tokens [n, L', C]."""
        raise NotImplementedError

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; what nobody runs is left out: further layers, a norm behind them, a head."""
        own = renamed(name, self.rules)
        layer = re.match(r"tower\.blocks\.(\d+)\.", own)
        is_behind = layer is not None and int(layer[1]) >= len(self.tower.blocks)
        if is_behind or own.startswith("tower.head.") or own.endswith((".position_ids", ".mask_token")):
            return []
        if own.startswith("tower.post_norm.") and self.tower.post_norm is None:
            return []
        return [(own, tensor)]


def merged(hidden: torch.Tensor, merge: int) -> torch.Tensor:
    """Patches [n, L, E] of square tiles -> [n, L / merge^2, merge^2 * E]: those of a square side by side, by rows."""
    n, count, size = hidden.shape
    side = int(count**0.5)
    cut = hidden.reshape(n, side // merge, merge, side // merge, merge, size)
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(n, count // merge**2, merge**2 * size)
