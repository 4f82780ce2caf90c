"""Gemma 3n with pictures and sounds: squares of 256 tokens each, and 188 tokens for a sound of up to half a minute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.media.settings import read_settings
from app.models.families.gemma3n import Gemma3nForCausalLM
from app.models.multimodal.base import MediaEncoder, MediaModel, Picture
from app.models.multimodal.gemma3n_embedder import RULES, Embedder, MarkEmbeddings
from app.models.multimodal.gemma3n_sound import Gemma3nEars
from app.models.multimodal.mobilenet_v5 import SIDE, MobileNetV5, scale_of
from app.models.multimodal.vision_config import HALF, Normalization, VisionConfig

Grid = tuple[int, int, int]
NOTHING = (0.0, 0.0, 0.0)
ONES = (1.0, 1.0, 1.0)


class Gemma3nEyes(MediaEncoder):
    """Each place of the tower's output is a token."""

    rules = (*RULES, (r"^vision_tower\.timm_model\.", "tower."))

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        where, own = f"{info.directory}/config.json: vision_config", info.hf_config["vision_config"]
        size = VisionConfig(info, {"hidden_size": 2048}).whole("hidden_size")
        tokens = int(info.hf_config.get("vision_soft_tokens_per_image") or SIDE * SIDE)
        if tokens != SIDE * SIDE:
            raise CheckpointError(
                f"{where}: vision_soft_tokens_per_image is {tokens}, not {SIDE * SIDE}", param="model"
            )
        self.tower, self.scale = MobileNetV5(ctx, scale_of(own), size), size**0.5
        self.embedder = Embedder(ctx, info, own, size, where)
        self.dtype, self.device = ctx.dtype, ctx.device
        is_normed = read_settings(info.directory).get("do_normalize", True)
        found = Normalization.of(info, HALF, HALF)
        self.normalization = found if is_normed else Normalization(NOTHING, ONES, found.scale)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        pixels = torch.cat([picture.pixels for picture in pictures])
        seen = self.tower(self.normalization.apply(pixels, 1, self.dtype))
        return self.embedder(seen.flatten(0, 1) * self.scale)[None]  # type: ignore[no-any-return]

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return SIDE * SIDE

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        pixels = torch.zeros(1, 3, 768, 768, dtype=torch.uint8, device=self.device)
        return Picture(pixels, (1, SIDE, SIDE))


class Gemma3nForConditionalGeneration(MediaModel, Gemma3nForCausalLM):
    """Gemma 3n; of a checkpoint without encoders, its text."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        if marks := tuple(encoder.embedder for encoder in (*self._described, *self._heard)):
            self.model.other_tokens = MarkEmbeddings(marks)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Gemma3nEyes(ctx, info)

    @classmethod
    def ears_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder | None:
        """See SeeingModel."""
        return Gemma3nEars(ctx, info) if isinstance(info.hf_config.get("audio_config"), dict) else None
