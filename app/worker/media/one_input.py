"""An encoder of inputs of one size as EncoderGraphs takes one of pictures: one recording, of one input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.config.engine import EngineConfig
from app.models.encoder_decoder import InputEncoder
from app.models.multimodal.base import Picture
from app.platforms import platform_of
from app.worker.media.encoder_graphs import EncoderGraphs, NoGraphs

GRID = (1, 1, 1)


class OneInput:
    """One call with one input."""

    def __init__(self, encoder: InputEncoder) -> None:
        self._encoder = encoder

    def __call__(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """[1, n, C]."""
        states: torch.Tensor = self._encoder([one.pixels for one in pictures])
        return states[None]

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder."""
        return Picture(self._encoder.largest(), GRID)

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """See MediaEncoder."""
        return self._encoder.info.num_positions

    def constants(self, grid: tuple[int, int, int]) -> object:
        """See MediaEncoder."""
        return self._encoder.constants()


def create_graphs(config: EngineConfig, encoder: InputEncoder, device: torch.device) -> NoGraphs:
    """That of an encoder which can be recorded, on a device that has graphs."""
    if not encoder.is_capturable or config.cuda_graphs == "off" or not platform_of(device).has_graphs:
        return NoGraphs()
    positions = [encoder.info.num_positions]
    return EncoderGraphs(OneInput(encoder), device, positions, must_start=config.cuda_graphs == "on")
