"""LFM2-VL: SigLIP 2 (Tschannen et al., 2025), whose learned positions are stretched over tiles and pictures of any
size, squares of its patches to a token, over LFM2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isqrt

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import computed
from app.errors import CheckpointError
from app.kernels.attention.encoder import plan_encoder
from app.layers.context import BuildContext
from app.layers.layer_norm import LayerNorm
from app.media.processors.lfm2_vl import tile_rows
from app.media.settings import read_settings
from app.models.families.lfm2 import Lfm2ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel, Picture
from app.models.multimodal.llava import PROJECTOR
from app.models.multimodal.qwen_vision import Grid, in_merge_order
from app.models.multimodal.tile_vision import SIGLIP, TOWER, TileEncoder, TileSettings, TileVision
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import PlainBlock, Span

MODEL = {
    **{"downsample_factor": 2, "projector_hidden_act": "gelu", "projector_hidden_size": 2560},
    **{"projector_bias": True, "projector_use_layernorm": True},
}


class Lfm2Encoder(TileEncoder):
    """The tower over patches of any number, then the projector. A grid: tiles, and rows and columns of what follows."""

    rules = (*TOWER, (r"^multi_modal_projector\.layer_norm\.", "projector_norm."), PROJECTOR)
    is_capturable = False  # positions are stretched for each size

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        v = VisionConfig(info, {**SIGLIP, "num_patches": 256})
        side = isqrt(v.whole("num_patches"))
        if side**2 != v.whole("num_patches"):
            raise CheckpointError(f"vision_config.num_patches {v.whole('num_patches')} fill no square", param="model")
        v = v.with_value("image_size", side * v.side("patch_size"))
        model = VisionConfig.of_model(info, MODEL)
        self.merge, self.rows = (
            model.whole("downsample_factor"),
            tile_rows(read_settings(info.directory), info.hf_config),
        )
        self.tower = TileVision(ctx, v, TileSettings(v.whole("num_hidden_layers"), post_norm=True))
        size = self.tower.size * self.merge**2
        self.projector_norm = LayerNorm(ctx, size, 1e-5) if model.flag("projector_use_layernorm") else None
        inner, act, bias = (
            model.whole("projector_hidden_size"),
            model.text("projector_hidden_act"),
            model.flag("projector_bias"),
        )
        self.projector = PlainBlock(ctx, size, inner, act, out=info.hidden_size, bias=bias)

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        tiles, rows, columns = grid
        return (tiles * self.rows**2 + rows * columns) // self.merge**2

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        rows = max(1, isqrt(num_tokens)) * self.merge
        shape = rows * rows, 3, self.tower.patch, self.tower.patch
        return Picture(torch.zeros(shape, dtype=torch.uint8, device=self.device), (0, rows, rows))

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        shapes = [shape for picture in pictures for shape in self._shapes(picture.grid)]
        pixels = torch.cat([picture.pixels for picture in pictures])
        x = self.tower.patch_embed(self.normalization.apply(pixels, 1, self.dtype))
        stretched = {shape: self._positions(shape) for shape in set(shapes)}
        x = x + torch.cat([stretched[shape] for shape in shapes])
        starts = [0]
        for rows, columns in shapes:
            starts.append(starts[-1] + rows * columns)
        x = self.tower.through(x, Span(plan_encoder(starts, x.device)))
        x = x.reshape(-1, self.tower.size * self.merge**2)
        x = x if self.projector_norm is None else self.projector_norm(x)
        return self.projector(x).unsqueeze(0)  # type: ignore[no-any-return]

    def _shapes(self, grid: Grid) -> list[tuple[int, int]]:
        """Rows and columns of a picture's tiles, and of all of it."""
        tiles, rows, columns = grid
        return [(self.rows, self.rows)] * tiles + [(rows, columns)] * (rows > 0)

    def _positions(self, shape: tuple[int, int]) -> torch.Tensor:
        """Learned positions [T, E] as a picture would be resized to a grid, in the order of its patches."""
        side = isqrt(len(self.tower.positions))
        laid = self.tower.positions.view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(laid.float(), shape, mode="bilinear", antialias=True)[0].to(laid.dtype)
        return in_merge_order(resized.permute(1, 2, 0), self.merge)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; a patch's numbers are stored with its channels last."""
        for own, stored in super().own_tensors(name, tensor):
            yield own, computed(stored, self._channels_first) if own == "tower.patch_embed.weight" else stored

    def _channels_first(self, weight: torch.Tensor) -> torch.Tensor:
        patch = self.tower.patch
        return weight.view(-1, patch, patch, 3).permute(0, 3, 1, 2)


class Lfm2VlForConditionalGeneration(MediaModel, Lfm2ForCausalLM):
    """LFM2-VL and LFM2.5-VL."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Lfm2Encoder(ctx, info)
