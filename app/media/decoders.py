"""Decodes pictures in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.config.media import MediaConfig
from app.media.header import Header
from app.media.processes import ProcessPool

MODULE = "app.media.decoder_process"


@dataclass(slots=True, frozen=True)
class Decoded:
    """A picture's size once it stands upright, and the pixels that a processor made of it."""

    size: tuple[int, int]
    shape: tuple[int, ...]
    pixels: bytes


class Decoders:
    """`decode` may be called from any thread; it blocks until one of `max_decoders` processes is free and done."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._processes = ProcessPool(MODULE, config.max_decoders, config.decode_memory_bytes)

    def decode(self, data: bytes, header: Header, family: str, settings: Mapping[str, Any]) -> Decoded:
        """Pixels of a picture. InvalidRequestError says what is wrong with it, OverloadedError that no process could
        be had; the messages go on behind the name of the field."""
        limits = self._config
        sizes = {"max_pixels": limits.max_image_pixels, "max_side": limits.max_image_side}
        job = {"format": header.format, "family": family, "settings": dict(settings), **sizes}
        said, pixels = self._processes.ask(job, data, limits.decode_timeout_s)
        width, height = said["size"]
        return Decoded((width, height), tuple(said["shape"]), bytes(pixels))

    def close(self) -> None:
        """End the processes; idempotent."""
        self._processes.close()
