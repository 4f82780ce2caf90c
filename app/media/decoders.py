"""Processes that decode pictures: a few, each started when it is needed first, killed when a picture is too much."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.config.media import MediaConfig
from app.errors import InvalidRequestError, OverloadedError
from app.limited_process import TOO_BUSY, LimitedProcess
from app.media.header import Header

MODULE = "app.media.decoder_process"
# Nothing of ours is in the environment of a process that reads what strangers send; its threads would count as memory.
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


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
        self._free: list[LimitedProcess] = []
        self._places = threading.Semaphore(config.max_decoders)
        self._is_closed = False

    def decode(self, data: bytes, header: Header, family: str, settings: Mapping[str, Any]) -> Decoded:
        """Pixels of a picture. InvalidRequestError says what is wrong with it, OverloadedError that no process could
        be had; the messages go on behind the name of the field."""
        limits = self._config
        sizes = {"max_pixels": limits.max_image_pixels, "max_side": limits.max_image_side}
        job = {"format": header.format, "family": family, "settings": dict(settings), **sizes}
        with self._places:
            answer = self._ask(json.dumps(job).encode() + b"\n" + data)
        line, _, pixels = answer.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise InvalidRequestError(said["error"])
        width, height = said["size"]
        return Decoded((width, height), tuple(said["shape"]), pixels)

    def _ask(self, job: bytes) -> bytes:
        process = self._ready()
        answer, ended = process.ask(job, self._config.decode_timeout_s)
        if ended is None:
            self._give_back(process)
            return answer
        process.kill()
        if ended == TOO_BUSY:
            raise OverloadedError(f"was not decoded: {TOO_BUSY}; try later")
        raise InvalidRequestError(f"is too much work: decoding it {ended}")

    def _ready(self) -> LimitedProcess:
        """A process that can be asked."""
        while self._free:
            process = self._free.pop()
            if process.wait_ready():
                return process
            process.kill()
        process = LimitedProcess(MODULE, (), self._config.decode_memory_bytes, ENVIRONMENT)
        if not process.wait_ready():
            process.kill()
            raise OverloadedError("was not decoded: the process for it does not start; try later")
        return process

    def _give_back(self, process: LimitedProcess) -> None:
        if self._is_closed:
            process.kill()
        else:
            self._free.append(process)

    def close(self) -> None:
        """End the processes; idempotent."""
        self._is_closed = True
        while self._free:
            self._free.pop().kill()
