"""One video as it was found, before its frames are chosen; and frames that came without a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.media.processors.base import Size

USUAL_RATE = 24.0  # frames a second of what does not say it, as transformers takes


@dataclass(slots=True, frozen=True)
class Clip:
    """A video's frames: their size once they stand upright, how many there are, and how many go by in a second."""

    size: Size
    num_frames: int
    fps: float
    is_chosen: bool = False  # somebody chose the frames already: all of them are shown

    def as_json(self) -> dict[str, Any]:
        """The arguments of its constructor."""
        return {
            "size": list(self.size),
            "num_frames": self.num_frames,
            "fps": self.fps,
            "is_chosen": self.is_chosen,
        }

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Clip:
        """Make it again."""
        width, height = said["size"]
        return cls((int(width), int(height)), int(said["num_frames"]), float(said["fps"]), bool(said["is_chosen"]))


@dataclass(slots=True, frozen=True)
class RawVideo:
    """Frames that `LLM` was given as an array."""

    clip: Clip
    frames: bytes  # uint8 [num_frames, H, W, 3]
