"""Audio Flamingo 3 (Ghosh et al., 2025): Whisper's tower over windows of 30 seconds, the mean of every two of its
positions, and two linear layers over Qwen2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.layers.context import BuildContext
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.sound_layers import PROJECTED_TOWER, SoundSettings, SoundTower, with_key_bias
from app.models.multimodal.vision_layers import PlainBlock

Grid = tuple[int, int, int]


class AudioFlamingoEncoder(MediaEncoder):
    """A sound is some windows, of which only the positions of its own frames are computed."""

    rules = PROJECTED_TOWER

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        s = SoundSettings.of(info.hf_config["audio_config"], f"{info.directory}/config.json: audio_config")
        self.settings, self._device, out = s, ctx.device, info.hidden_size
        act, bias = str(info.hf_config.get("projector_hidden_act", "gelu")), info.hf_config.get("projector_bias", True)
        self.tower = SoundTower(ctx, s, pooled=2)
        self.projector = PlainBlock(ctx, s.size, out, act, out=out, bias=bool(bias))

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        lengths = [length for sound in pictures for length in self._positions(sound.grid)]
        return self.projector(self.tower(torch.cat([sound.pixels for sound in pictures]), lengths))[None]  # type: ignore[no-any-return]

    def _positions(self, grid: Grid) -> list[int]:
        """Those of each window that are sound."""
        most = self.settings.num_positions
        return [*[most] * (grid[0] - 1), (grid[2] - 2 * most * (grid[0] - 1) - 1) // 2 + 1]

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return sum(length // 2 for length in self._positions(grid))

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        s = self.settings
        count = max(1, num_tokens // max(1, s.num_positions // 2))
        pixels = torch.zeros(count, s.num_mels, 2 * s.num_positions, device=self._device)
        return Picture(pixels, (count, 1, 2 * s.num_positions * count))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder."""
        return [pair for own, one in super().own_tensors(name, tensor) for pair in with_key_bias(own, one)]


class AudioFlamingo3ForConditionalGeneration(MediaOverText):
    """A Qwen2 that listens."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return AudioFlamingoEncoder(ctx, info)
