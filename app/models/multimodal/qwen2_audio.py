"""Qwen2-Audio (Chu et al., 2024): Whisper's tower, the mean of every two of its positions, and a linear layer over
Qwen2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.layers.context import BuildContext
from app.layers.replicated import ReplicatedLinear
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.sound_layers import TOWER, SoundSettings, SoundTower, with_key_bias

Grid = tuple[int, int, int]


class Qwen2AudioEncoder(MediaEncoder):
    """A sound is one window; only the positions of its own frames are computed."""

    rules = ((r"^audio_tower\.", "tower."), (r"^multi_modal_projector\.linear\.", "projector."), *TOWER)

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        s = SoundSettings.of(info.hf_config["audio_config"], f"{info.directory}/config.json: audio_config")
        self.settings, self._device = s, ctx.device
        self.tower = SoundTower(ctx, s, pooled=2)
        self.projector = ReplicatedLinear(ctx, s.size, info.hidden_size)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        features = torch.stack([sound.pixels for sound in pictures])
        states = self.tower(features, [_positions(sound.grid) for sound in pictures])
        return self.projector(states)[None]  # type: ignore[no-any-return]

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return _positions(grid) // 2

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        frames = min(2 * self.settings.num_positions, max(4, 4 * num_tokens))
        pixels = torch.zeros(self.settings.num_mels, 2 * self.settings.num_positions, device=self._device)
        return Picture(pixels, (1, 1, frames))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder."""
        return [pair for own, one in super().own_tensors(name, tensor) for pair in with_key_bias(own, one)]


def _positions(grid: Grid) -> int:
    return (grid[2] - 1) // 2 + 1


class Qwen2AudioForConditionalGeneration(MediaOverText):
    """A Qwen2 that listens."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return Qwen2AudioEncoder(ctx, info)
