"""Voxtral (Mistral, 2025): Whisper's tower over windows of 30 seconds, groups of its positions side by side, and two
linear layers over Llama."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.over_text import MediaOverText
from app.models.multimodal.sound_layers import PROJECTED_TOWER, SoundSettings, SoundTower, with_key_bias
from app.models.multimodal.vision_layers import PlainBlock

Grid = tuple[int, int, int]


class VoxtralEncoder(MediaEncoder):
    """A sound is some windows, all of which are computed whole."""

    rules = PROJECTED_TOWER

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        s = SoundSettings.of(info.hf_config["audio_config"], f"{info.directory}/config.json: audio_config")
        if s.num_positions * s.size % s.inner:
            raise UnsupportedError("Voxtral: a window is no whole number of groups of positions", param="model")
        self.settings, self._device, out = s, ctx.device, info.hidden_size
        self.tokens_each = s.num_positions * s.size // s.inner  # of a window
        act = str(info.hf_config.get("projector_hidden_act", "gelu"))
        self.tower = SoundTower(ctx, s)
        self.projector = PlainBlock(ctx, s.inner, out, act, out=out, bias=False)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        states = self.tower(torch.cat([sound.pixels for sound in pictures]))
        return self.projector(states.view(-1, self.settings.inner))[None]  # type: ignore[no-any-return]

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return grid[0] * self.tokens_each

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        count, frames = max(1, num_tokens // self.tokens_each), 2 * self.settings.num_positions
        pixels = torch.zeros(count, self.settings.num_mels, frames, device=self._device)
        return Picture(pixels, (count, 1, frames))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See MediaEncoder."""
        return [pair for own, one in super().own_tensors(name, tensor) for pair in with_key_bias(own, one)]


class VoxtralForConditionalGeneration(MediaOverText):
    """A Llama that listens."""

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """See MediaModel."""
        return VoxtralEncoder(ctx, info)
