"""The contract of processors of videos: which frames are shown, how many tokens they are, and what the model's encoder
reads of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from app.media.processors.base import Layout, MediaProcessor, Pixels
from app.media.videos.clip import Clip


class VideoProcessor(MediaProcessor):
    """That of videos. Frames are resized as they are decoded, each on its own."""

    @property
    def around_pad(self) -> tuple[str, str] | None:
        """Texts of single tokens that templates write on both sides of a placeholder, and an item's own tokens bring
        themselves; None: it brings none."""
        return None

    @property
    def resample(self) -> int:
        """The filter, by Pillow's number."""
        return int(self.settings["resample"])

    @abstractmethod
    def indices(self, clip: Clip) -> Sequence[int]:
        """The frames that are shown, ascending; one may come several times."""

    @abstractmethod
    def layout(self, clip: Clip) -> Layout:
        """Lays out a video; InvalidRequestError for one that the model does not take."""

    @abstractmethod
    def pixels(self, frames: Pixels, layout: Layout) -> Pixels:
        """The pixels that the encoder reads, in its own order, of frames [n, H, W, 3] of the layout's size."""
