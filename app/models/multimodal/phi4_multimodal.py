"""Phi-4-multimodal: SigLIP's layers over tiles with patches that show nothing, a mean of each four, two products. The
adapters that its checkpoint brings for pictures and sounds are adapters like others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight
from app.media.processors.phi4 import num_tokens
from app.models.families.phi3 import Phi3ForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel, Picture
from app.models.multimodal.phi4_sound import Phi4Ears
from app.models.multimodal.tile_vision import TOWER, TileEncoder, TileSettings, TileVision
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import Span, patches_of

PHI4 = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"image_size": 448, "crop_size": 448, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh"},
    **{"layer_norm_eps": 1e-6, "feature_layer": -2},
}
IMAGES = r"^embed_tokens_extend\.image_embed\."
Grid = tuple[int, int, int]


class Phi4Tower(TileVision):
    """Patches that show nothing are no keys, and stand at the first position; the others of a tile are spread over all
    positions, however few they are."""

    def of_picture(self, tiles: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        """Tiles [n, 3, side, side] and which of their patches show something, bool [n, side, side] -> [n, L, C]."""
        count = self.side // self.patch
        places = torch.zeros(len(tiles), count, count, dtype=torch.int64)
        for place, own in zip(places, shown, strict=True):
            rows, columns = (_spread(int(own.select(axis, 0).sum()), count) for axis in (1, 0))
            place[: len(rows), : len(columns)] = rows[:, None] * count + columns
        x = self.patch_embed(patches_of(tiles, self.patch))
        x = x + self.positions[places.flatten().to(x.device)]
        span = Span(self.plan(len(tiles), count * count, x.device), seen=shown.flatten().to(x.device))
        for block in self.blocks:
            x = block(x, span)
        return x.view(len(tiles), count * count, self.size)  # type: ignore[no-any-return]


def _spread(shown: int, count: int) -> torch.Tensor:
    """Positions of the first `shown` of `count` patches, over all of them."""
    parts = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(float(shown)))).clamp(max=1.0 - 1e-6)
    return torch.bucketize(parts, torch.arange(1 / count, 1.0, 1 / count), right=True)[:shown]


class Phi4Encoder(TileEncoder):
    """A picture at a time."""

    rules = (
        (IMAGES + r"img_processor\.", "vision_tower."),
        *TOWER,
        (IMAGES + r"img_projection_", ""),
        (IMAGES + r"global_img_feature_extensor$", "between"),
        (IMAGES + r"sub_img_feature_extensor$", "row_end"),
    )
    is_capturable = False  # which patches show something is found on the host
    tower: Phi4Tower

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, Normalization.of(info, HALF, HALF))
        v = VisionConfig(info, PHI4)
        depth, layer = v.whole("num_hidden_layers"), v.whole("feature_layer")
        self.tower = Phi4Tower(ctx, v, TileSettings(layer if layer >= 0 else depth + 1 + layer))
        self.patches = self.tower.side // self.tower.patch
        if self.patches % 2 or v.whole("crop_size") != self.tower.side:
            raise CheckpointError(f"{info.directory}: vision_config: tiles of {self.patches} patches", param="model")
        size = self.tower.size
        self.up, self.down = (
            ReplicatedLinear(ctx, size, info.hidden_size),
            ReplicatedLinear(ctx, info.hidden_size, info.hidden_size),
        )
        self.between = Weight(torch.empty(1, 1, size, dtype=ctx.dtype), REPLICATED)
        self.row_end = Weight(torch.empty(1, 1, 1, size, dtype=ctx.dtype), REPLICATED)

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return num_tokens(grid, self.patches)

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder: tiles in a column."""
        side, half = self.tower.side, self.patches // 2
        tiles = max(1, num_tokens // (half * (half + 1)) - 2)
        pixels = torch.zeros(tiles, 3, side, side, dtype=torch.uint8, device=self.device)
        return Picture(pixels, (tiles, tiles * self.patches, self.patches))

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        tokens = torch.cat([self._tokens(picture) for picture in pictures])
        return self.down(F.gelu(self.up(tokens))).unsqueeze(0)  # type: ignore[no-any-return]

    def _tokens(self, picture: Picture) -> torch.Tensor:
        """A picture's rows, what stands between, and the rows of all of it in one tile, [n, C]."""
        high, rows, columns = picture.grid
        wide, side, count = len(picture.pixels) // high, self.tower.side, self.patches
        tiles = self.normalization.apply(picture.pixels, 1, torch.float32)
        laid = tiles.view(high, wide, 3, side, side).permute(2, 0, 3, 1, 4).reshape(1, 3, high * side, wide * side)
        small = F.interpolate(laid, (side, side), mode="bicubic", align_corners=False)
        shown = torch.zeros(high * count, wide * count, dtype=torch.bool)
        shown[:rows, :columns] = True
        cut = shown.view(high, count, wide, count).transpose(1, 2).reshape(-1, count, count)
        whole = torch.ones(1, count, count, dtype=torch.bool)
        hidden = self.tower.of_picture(torch.cat((small, tiles)).to(self.dtype), torch.cat((whole, cut)))
        half = count // 2
        pooled = hidden.view(-1, half, 2, half, 2, self.tower.size).mean((2, 4))
        parts = pooled[1:].view(high, wide, half, half, -1).transpose(1, 2).reshape(high * half, wide * half, -1)
        seen = parts[: -(-rows // 2), : -(-columns // 2)]
        return torch.cat((self._with_ends(seen), self.between[0], self._with_ends(pooled[0])))

    def _with_ends(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [h, w, C] with what ends each, [h * (w + 1), C]."""
        return torch.cat((rows, self.row_end[0].expand(len(rows), 1, -1)), dim=1).flatten(0, 1)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder; what hears is left out."""
        return [] if ".audio_embed." in name else super().own_tensors(name, tensor)


class Phi4MultimodalForCausalLM(MediaModel, Phi3ForCausalLM):
    """Phi-4-mini's layers with pictures, in transformers' own form."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Phi4Encoder(ctx, info)

    @classmethod
    def ears_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder | None:
        """See SeeingModel."""
        return Phi4Ears(ctx, info) if isinstance(info.hf_config.get("audio_config"), dict) else None
