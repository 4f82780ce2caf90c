"""LLaVA-OneVision (Li et al., 2024): SigLIP's tiles of a picture laid side by side, what pads them cut off, a learned
token behind each row of patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.weight import REPLICATED, Weight
from app.media.processors.llava_onevision import Grid, kept_patches, most_tiles, num_tokens, shapes_of
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.llava import PROJECTOR, projector
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.tile_vision import SIGLIP, TOWER, TileEncoder, TileSettings, TileVision
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, Normalization, VisionConfig

MODEL = {
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
    **{"projector_hidden_act": "gelu", "multimodal_projector_bias": True},
}


class OneVisionEncoder(TileEncoder):
    """The tower and the projector, a picture at a time: of few tokens it may have many tiles."""

    rules = (*TOWER, PROJECTOR, (r"^image_newline$", "row_end"))
    is_capturable = False  # its largest picture is far larger than its tokens say

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, CLIP_MEAN, CLIP_STD))
        v, model = VisionConfig(info, SIGLIP), VisionConfig.of_model(info, MODEL)
        kind = info.hf_config["vision_config"].get("model_type", "siglip_vision_model")
        if kind != "siglip_vision_model" or model.text("vision_feature_select_strategy") != "full":
            raise UnsupportedError(f"{info.architecture} with a tower other than SigLIP's ({kind})", param="model")
        depth, layer = v.whole("num_hidden_layers"), model.whole("vision_feature_layer")
        self.tower = TileVision(ctx, v, TileSettings(layer if layer >= 0 else depth + 1 + layer))
        self.projector = projector(ctx, self.tower.size, info, model)
        self.row_end = Weight(torch.empty(info.hidden_size, dtype=ctx.dtype), REPLICATED)
        self.patches = self.tower.side // self.tower.patch  # along a tile's side
        self.most = most_tiles(model.text("vision_aspect_ratio"))
        self.shapes = shapes_of(info.hf_config.get("image_grid_pinpoints"), self.tower.side)

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
        return torch.cat([self._tokens(picture) for picture in pictures]).unsqueeze(0)

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


class LlavaOnevisionForConditionalGeneration(MediaOverText):
    """LLaVA-OneVision over Qwen 2."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return OneVisionEncoder(ctx, info)
