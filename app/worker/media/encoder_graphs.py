"""Encoders of pictures as CUDA graphs: one replay for a picture of a size that comes often, where its launches take the
host longer than the device.

A start records some squares (the warm-up plan's `pictures`), the largest first, which tells the memory that all may
share. Further sizes are recorded when they come for the third time: what came is then encoded by that recording. There
are no more once there are so many, or they take more memory than the first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.models.multimodal.base import MediaEncoder, Picture
from app.platforms import platform_of
from app.worker.graphs.recording import Recorder, no_collection

logger = logging.getLogger("manta.graphs")

COMMON = 3  # times that a size comes before it is recorded
MOST_GRAPHS = 64
MOST_SIZES = 1024  # that are counted
MORE_MEMORY = 1.5  # times what the largest took: sizes share memory, but not without gaps

Shape = tuple[int, ...]
Grid = tuple[int, int, int]
Size = tuple[Shape, Grid]  # of pixels


@dataclass(slots=True, frozen=True)
class _Recorded:
    """A recording, and what it reads and writes; constants stay alive with it."""

    graph: torch.cuda.CUDAGraph
    pixels: torch.Tensor
    out: torch.Tensor
    constants: object


class NoGraphs:
    """Stands where there are none."""

    def start(self) -> None:
        """Nothing is recorded."""

    def serves(self, shape: Shape, grid: Grid) -> bool:
        """See EncoderGraphs."""
        return False

    def encode(self, picture: Picture) -> torch.Tensor | None:
        """See EncoderGraphs."""
        return None

    def release(self) -> None:
        """Nothing is held."""


class Recordable(Protocol):
    """An encoder as recordings use it: see MediaEncoder."""

    def __call__(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """[1 + num_deep, n, C]."""

    def largest(self, num_tokens: int) -> Picture:
        """A picture of about so many tokens."""

    def num_tokens(self, grid: Grid) -> int:
        """Tokens of a picture of a grid."""

    def constants(self, grid: Grid) -> object:
        """Returns what encoding such a picture reads beside weights and pixels."""


class EncoderGraphs(NoGraphs):
    """Recordings of one encoder by size: the shape of the pixels, and the grid."""

    def __init__(
        self, encoder: Recordable, device: torch.device, squares: Sequence[int], *, must_start: bool = False
    ) -> None:
        """`squares`: tokens of the pictures that a start records, the largest first, which no recorded one exceeds.
        `must_start`: without them there is no start."""
        self._encoder, self._device, self._squares, self._must_start = encoder, device, squares, must_start
        self._failure: Exception | None = None
        self._counts: dict[Size, int] = {}
        self._recorded: dict[Size, _Recorded] = {}
        self._recorder: Recorder | None = None
        self._pixels = self._out = torch.empty(0)
        self._most_pixels, self._most_bytes = 0, 0.0  # 0: not known yet
        self._is_full = False

    def start(self) -> None:
        """Record the squares, while nothing else runs. ConfigError where they must be recorded, and one cannot be."""
        for count in self._squares:
            self._find(self._encoder.largest(count))
        if self._must_start and (error := self._failure) is not None:
            reason = f"the capture of the encoder failed: {type(error).__name__}: {error}"
            raise ConfigError(f"cuda_graphs=on, but {reason}; use auto", param="cuda_graphs") from error
        torch.cuda.empty_cache()  # what runs took on the side stream

    def serves(self, shape: Shape, grid: Grid) -> bool:
        """Counts a size that came; true where it is recorded, or is to be by now."""
        size = shape, grid
        if size in self._recorded:
            return True
        is_large = prod(shape) > self._most_pixels or self._encoder.num_tokens(grid) > self._squares[0]
        if is_large or self._is_full or len(self._recorded) >= MOST_GRAPHS:
            return False
        if size not in self._counts and len(self._counts) >= MOST_SIZES:
            self._counts.clear()
        self._counts[size] = self._counts.get(size, 0) + 1
        return self._counts[size] >= COMMON

    def encode(self, picture: Picture) -> torch.Tensor | None:
        """Embeddings [1 + num_deep, n, C] of a picture that is served, the caller's own; None: it could not be
        recorded."""
        found = self._find(picture)
        if found is None:
            return None
        found.pixels.copy_(picture.pixels)
        found.graph.replay()
        return found.out.clone()

    def release(self) -> None:
        """Forget the recordings: weights move. What was common is recorded as it comes again."""
        if self._recorded:
            torch.cuda.synchronize(self._device)
        for one in self._recorded.values():
            one.graph.reset()
        self._recorded.clear()
        self._recorder, self._pixels, self._out = None, torch.empty(0), torch.empty(0)

    def _find(self, picture: Picture) -> _Recorded | None:
        """The recording of a picture's size, made where it lacks; None, and no more from now on, where it cannot be."""
        size = tuple(picture.pixels.shape), picture.grid
        found = self._recorded.get(size)
        if found is not None or self._is_full:
            return found
        try:
            found = self._made(picture)
        except Exception as error:  # whatever a kernel or a library raises while it is captured
            logger.warning("CUDA graphs: no more are made of the encoder of pictures", exc_info=error)
            self._is_full, self._failure = True, error
            return None
        self._recorded[size] = found
        return found

    def _made(self, picture: Picture) -> _Recorded:
        if self._recorder is None:
            self._make_room()
        assert self._recorder is not None
        pixels = self._pixels[: picture.pixels.numel()].view(picture.pixels.shape)
        out = self._out[:, : self._encoder.num_tokens(picture.grid)]

        def run() -> None:
            out.copy_(self._encoder([Picture(pixels, picture.grid)]))

        constants = self._encoder.constants(picture.grid)  # now: a recording sends nothing
        with no_collection():
            graph = self._recorder.record(run)
        taken = self._recorder.pool_bytes()
        self._most_bytes = self._most_bytes or MORE_MEMORY * taken
        self._is_full = taken > self._most_bytes
        return _Recorded(graph, pixels, out, constants)

    def _make_room(self) -> None:
        """Make what recordings read and write beside their own memory: as large as the largest needs it."""
        largest = self._encoder.largest(self._squares[0])
        embeddings = self._encoder([largest])
        num_deep, count, width = embeddings.shape
        shape = num_deep, max(count, self._squares[0]), width
        self._out = torch.empty(shape, dtype=embeddings.dtype, device=self._device)
        self._most_pixels = largest.pixels.numel() * shape[1] // count
        self._pixels = torch.zeros(self._most_pixels, dtype=largest.pixels.dtype, device=self._device)
        self._recorder = Recorder(self._device)


def create_graphs(
    config: EngineConfig, encoder: MediaEncoder | None, device: torch.device, squares: Sequence[int]
) -> NoGraphs:
    """Those of an encoder whose calls can be recorded, on a device that has graphs."""
    wanted = [min(count, config.max_item_tokens) for count in squares]
    if encoder is None or not encoder.is_capturable or config.cuda_graphs == "off":
        return NoGraphs()
    if not platform_of(device).has_graphs:
        return NoGraphs()
    squares = sorted(set(wanted), reverse=True)
    return EncoderGraphs(encoder, device, squares, must_start=config.cuda_graphs == "on")
