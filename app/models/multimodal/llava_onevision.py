"""LLaVA-NeXT (Liu et al., 2024), Granite Vision and LLaVA-OneVision (Li et al., 2024): tiles of a picture laid side by
side, what pads them cut off, a learned token behind each row of patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.layers.weight import REPLICATED, Weight
from app.media.processors.llava_next import SIDES
from app.media.processors.llava_onevision import (
    MOST_TILES,
    Grid,
    kept_patches,
    most_tiles,
    num_tokens,
    shapes_of,
    sides_of,
)
from app.models.decoder_settings import DecoderSettings
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.llava import CLIP_TOWER, LLAVA, PROJECTOR, SIGLIP_TOWER, chosen_tower, projector, tower_kind
from app.models.multimodal.over_text import MediaOverText, text_family
from app.models.multimodal.tile_vision import TOWER, TileEncoder
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, Normalization, VisionConfig

MODEL = {
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
    **{"projector_hidden_act": "gelu", "multimodal_projector_bias": True},
}


class NextEncoder(TileEncoder):
    """The tower and the projector, a picture at a time: of few tokens it may have many tiles."""

    rules = (*TOWER, PROJECTOR, (r"^image_newline$", "row_end"))
    defaults: ClassVar[Mapping[str, Any]] = LLAVA
    usual_tower: ClassVar[str] = CLIP_TOWER
    sides: ClassVar[Sequence[Sequence[int]] | None] = SIDES  # of pictures, where config.json names none
    is_capturable = False  # its largest picture is far larger than its tokens say

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, CLIP_MEAN, CLIP_STD))
        model = VisionConfig.of_model(info, self.defaults)
        self.tower = chosen_tower(ctx, info, model, tower_kind(info, self.usual_tower))
        self.projector = projector(ctx, self.tower.width, info, model)
        self.row_end = Weight(torch.empty(info.hidden_size, dtype=ctx.dtype), REPLICATED)
        self.patches = self.tower.side // self.tower.patch  # along a tile's side
        self.most = self.most_kept(model)
        self.scale = text_family(info).settings(info).embedding_scale  # Granite's, which it has for all embeddings
        self.shapes = shapes_of(sides_of(info.hf_config, usual=self.sides), self.tower.side)

    def most_kept(self, model: VisionConfig) -> int:
        """Returns of how many tiles a picture keeps the patches; further ones are shrunk."""
        return MOST_TILES

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return num_tokens(grid, self.patches, self.most)

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder: of the most tiles, however few tokens come of them."""
        rows, columns = max(self.shapes, key=lambda shape: shape[0] * shape[1])
        side = self.tower.side
        pixels = torch.zeros(1 + rows * columns, 3, side, side, dtype=torch.uint8, device=self.device)
        return Picture(pixels, (rows, rows * self.patches, columns * self.patches))

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        found = torch.cat([self._tokens(picture) for picture in pictures]).unsqueeze(0)
        return found if self.scale == 1 else found * self.scale

    def _tokens(self, picture: Picture) -> torch.Tensor:
        """A picture's, [n, C]."""
        if not picture.grid[1]:
            return self._frames(picture.pixels)
        tiles = self.projector(self.tower(self.normalization.apply(picture.pixels, 1, self.dtype)))
        return torch.cat((tiles[0], self._rows(tiles[1:], picture.grid)))

    def _frames(self, pixels: torch.Tensor) -> torch.Tensor:
        """A video's, and what ends it; frames as many at a time as the largest picture has tiles."""
        size, side, found = -(-self.patches // 2), self.patches, list[torch.Tensor]()
        most = 1 + max(rows * columns for rows, columns in self.shapes)
        for first in range(0, len(pixels), most):
            frames = pixels[first : first + most]
            hidden = self.projector(self.tower(self.normalization.apply(frames, 1, self.dtype)))
            laid = hidden.view(len(frames), side, side, -1).permute(0, 3, 1, 2)
            found.append(F.interpolate(laid, (size, size), mode="bilinear").permute(0, 2, 3, 1).flatten(0, 2))
        return torch.cat((*found, self.row_end[None]))

    def _rows(self, tiles: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Patches [tiles, L, C] -> those of rows of the picture that show something, and what ends each row."""
        high, side = grid[0], self.patches
        wide = len(tiles) // high
        laid = tiles.view(high, wide, side, side, -1).permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)
        top, left = (laid.shape[1] - grid[1]) // 2, (laid.shape[2] - grid[2]) // 2
        laid = laid[:, top : top + grid[1], left : left + grid[2]]
        kept = kept_patches(grid, side, self.most)
        if kept != grid[1:]:
            laid = F.interpolate(laid[None], kept, mode="bilinear")[0]
        ends = self.row_end[:, None, None].expand(-1, kept[0], 1)
        return torch.cat((laid, ends), dim=2).flatten(1).t()


class OneVisionEncoder(NextEncoder):
    """Pictures of many tiles are shrunk."""

    defaults = MODEL
    usual_tower = SIGLIP_TOWER
    sides = None

    def most_kept(self, model: VisionConfig) -> int:
        """See NextEncoder."""
        return most_tiles(model.text("vision_aspect_ratio"))


class LlavaNextForConditionalGeneration(MediaOverText):
    """LLaVA-NeXT over Llama, Mistral, Qwen; over Granite, Granite Vision."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """See CausalLM; transformers gives it a head of its own, which does not scale Granite's logits."""
        return replace(MediaOverText.settings(info), logit_scale=1.0)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return NextEncoder(ctx, info)


class LlavaOnevisionForConditionalGeneration(MediaOverText):
    """LLaVA-OneVision over Qwen 2."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return OneVisionEncoder(ctx, info)
