"""The contract of processors: from a picture's pixels to those that the model's encoder reads, and its tokens; and what
those of sounds (`app/media/audio`) have in common with them.

They do what transformers' image processors do before they normalise, with Pillow and NumPy alone. One is made of plain
settings, so that it can be made again in the process that decodes; `layout` needs no pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from app.checkpoints.fields.kinds import FLAG, Kind, check, whole
from app.errors import CheckpointError, InvalidRequestError

Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]  # width and height
Detail = Literal["auto", "low", "high", "original"]
SIDE = whole(1, 1 << 14)
COUNT = whole(1, 1 << 16)
AREA = whole(1, 1 << 28)
MAX_RATIO = 200  # of the sides, as transformers takes for Qwen's
LOW_SIDE = 512  # what `detail: low` leaves of a picture, in pixels along a side


@dataclass(slots=True, frozen=True)
class Layout:
    """One picture as the encoder reads it: its size once it is resized, its grid of patches, and its tokens. A sound is
    a row of samples."""

    size: Size
    grid: tuple[int, int, int]  # frames or tiles, rows, columns; of a sound windows, 1 and frames that are sound
    runs: tuple[tuple[str, int], ...]  # its tokens: texts of single tokens, or of few, each so many times
    seconds_per_frame: float = 0.0  # of a video, from one row of frames in the grid to the next
    before: str = ""  # text before what stands around it, which becomes one text with what the prompt says there
    is_apart: bool = False  # each row of placeholders is an item of its own: a tile, with text between them

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes in a prompt, where each text is one."""
        return sum(count for _, count in self.runs)


class MediaProcessor(ABC):
    """One checkpoint's processor. `settings` are what `settings_of` made of its files, or of a request's options."""

    # Settings that are texts of tokens whose ids config.json has: its field, and the id where that is left out.
    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {}
    options: ClassVar[Mapping[str, Kind]] = {}  # settings that a configuration or a request may give
    refused: ClassVar[Mapping[str, bool]] = {}  # settings of files under which nothing is prepared: texts are served

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.placeholder = str(settings["placeholder"])  # the text of the token that stands for a piece of an item

    @classmethod
    @abstractmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """Settings from the files of a checkpoint: of its processor, and config.json. CheckpointError names a field."""

    @property
    def written(self) -> str:
        """The text that chat templates write where an item goes."""
        return self.placeholder

    @property
    def around(self) -> tuple[str, str]:
        """Texts before and behind an item's tokens, which become one text with what the prompt says there."""
        return "", ""

    def low(self) -> dict[str, Any]:
        """The settings for `detail: low`; the same where pictures are all of one size."""
        return self.settings


class Processor(MediaProcessor):
    """That of pictures."""

    refused: ClassVar[Mapping[str, bool]] = {"do_resize": False}

    @abstractmethod
    def layout(self, size: Size) -> Layout:
        """Lays out a picture of this size; InvalidRequestError for one that the model does not take."""

    @abstractmethod
    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """The pixels that the encoder reads, in its own order, of a picture [H, W, 3] of that layout."""


def resized(image: Pixels, size: Size, resample: int) -> Pixels:
    """A picture [H, W, 3] at another size, by one of Pillow's filters."""
    if image.shape[1::-1] == size:
        return image
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling(resample)))


def channels_first(image: Pixels) -> Pixels:
    """[H, W, 3] -> [3, H, W]."""
    return image.transpose(2, 0, 1)


def shaped_grid(size: Size, least: int, most: int, side: int) -> Size:
    """Columns and rows of `least` to `most` tiles [side, side] whose shape is nearest to the picture's; of equal ones
    the larger, where the picture fills half of it."""
    grids = [(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1) if i * j >= least]
    width, height = size
    best, found = float("inf"), (1, 1)
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        far = abs(width / height - columns / rows)
        if far < best or (far == best and width * height > 0.5 * side * side * columns * rows):
            best, found = far, (columns, rows)
    return found


def tiles_of(image: Pixels, side: int) -> Pixels:
    """[H, W, 3] -> [tiles, 3, side, side], row by row."""
    rows, columns = image.shape[0] // side, image.shape[1] // side
    cut = image.reshape(rows, side, columns, side, 3)
    return cut.transpose(0, 2, 4, 1, 3).reshape(rows * columns, 3, side, side)


def check_ratio(size: Size) -> None:
    """InvalidRequestError for a picture so narrow that resizing one side makes the other too long."""
    if max(size) > MAX_RATIO * min(size):
        raise InvalidRequestError(f"has {size[0]} x {size[1]} pixels; one side may be {MAX_RATIO} times the other")


COMMON: Mapping[str, Kind] = {"resample": whole(0, 5), "do_resize": FLAG, "do_convert_rgb": FLAG}


def checked(own: Mapping[str, Any], kinds: Mapping[str, Kind], what: str = "the image processor") -> None:
    """CheckpointError where a file's settings are of the wrong kind."""
    check(own, {**COMMON, **kinds}, what)


def agree(name: str, own: Any, field: str, built: Any) -> None:
    """CheckpointError where the processor's files say something else than config.json, after which the encoder is
    built; None: config.json does not say it."""
    if built is not None and own != built:
        raise CheckpointError(
            f"the image processor: {name} is {own}, which contradicts {field}, {built}, in config.json", param="model"
        )


def side_of(size: Any, *names: str) -> int | None:
    """A number out of a `size` as files write it: {"height": 336, "width": 336}, {"shortest_edge": 336} or 336."""
    found = (
        size if isinstance(size, int) else next((size[name] for name in names if name in size), None) if size else None
    )
    if found is None:
        return None
    check({"size": found}, {"size": AREA}, "the image processor")
    return int(found)
