"""Reads the pieces of a checkpoint into their places by several threads, in the order in which they lie on disk.

On a CPU a piece of the parameter's own type is read straight into the parameter's memory. On a GPU each thread has two
pinned buffers and a stream of its own: while one is copied to the device, the next piece is read into the other.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from app.checkpoints.tensors.load_progress import LoadProgress
from app.platforms import platform_of

PIECE_BYTES = 8 << 20
MOST_THREADS = 8

# Fills a contiguous tensor on the CPU, of the piece's stored type and of its shape.
Fill = Callable[[torch.Tensor], object]


@dataclass(slots=True, frozen=True)
class Piece:
    """A part of a stored tensor on its way to its place."""

    file: Path
    offset: int  # in the file, or any number that grows with it
    dtype: torch.dtype  # as stored
    target: torch.Tensor  # a view of a parameter, of the piece's shape
    fill: Fill

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * self.dtype.itemsize


class Reader:
    """Collects pieces, then reads them all."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Keep for `read`."""
        self._pieces.append(piece)

    def read(self) -> None:
        """Fill every target. Raises what a piece's fill raises; targets are then left half filled."""
        pieces = deque(sorted(self._pieces, key=lambda piece: (piece.file, piece.offset)))
        self._pieces = []
        if not pieces:
            return
        progress = LoadProgress(sum(piece.nbytes for piece in pieces))
        threads = min(num_threads(), len(pieces))
        with _own_torch_threads(), ThreadPoolExecutor(threads, "weights") as pool:
            for done in [pool.submit(_work, pieces, progress) for _ in range(threads)]:
                done.result()


class DirectReader(Reader):
    """Reads each piece when it is added, in the thread that adds it."""

    def add(self, piece: Piece) -> None:
        """Fill the target."""
        _work(deque([piece]), LoadProgress(piece.nbytes))


def num_threads() -> int:
    """Threads that read: one a core, but two even on one core, so that one reads while the other converts."""
    return max(2, min(MOST_THREADS, len(os.sched_getaffinity(0))))


@contextmanager
def _own_torch_threads() -> Iterator[None]:
    """Operators use one thread each within: the readers are the threads. New threads take their number from here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _work(pieces: deque[Piece], progress: LoadProgress) -> None:
    """One thread: piece after piece, until none is left or another thread has failed."""
    places: dict[torch.device, _Place] = {}
    try:
        with torch.inference_mode():  # weights are made in it
            while pieces:
                try:
                    piece = pieces.popleft()
                except IndexError:  # another thread took the last one
                    break
                device = piece.target.device
                if device not in places:
                    places[device] = _DevicePlace(device) if platform_of(device).is_async else _HostPlace()
                places[device].put(piece)
                progress.add(piece.nbytes)
            for place in places.values():
                place.finish()
    except BaseException:
        pieces.clear()
        raise


class _Place(ABC):
    """Takes the pieces of one thread."""

    @abstractmethod
    def put(self, piece: Piece) -> None:
        """Read and copy; on a device the copy may still be under way."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the copies."""


class _HostPlace(_Place):
    def put(self, piece: Piece) -> None:
        target = piece.target
        if target.dtype == piece.dtype and target.is_contiguous():
            piece.fill(target)
        else:
            stored = torch.empty(target.shape, dtype=piece.dtype)
            piece.fill(stored)
            target.copy_(stored)

    def finish(self) -> None:
        pass  # every copy is over when `put` returns


class _DevicePlace(_Place):
    def __init__(self, device: torch.device) -> None:
        self._runtime = platform_of(device).runtime
        self._runtime.set_device(device)
        begun = self._runtime.current_stream(device)  # who had the targets' memory before: a new thread has the default
        self._stream = self._runtime.Stream(device)
        self._stream.wait_stream(begun)
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [self._runtime.Event() for _ in range(2)]
        self._turn = 0

    def put(self, piece: Piece) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        self._copied[turn].synchronize()
        if piece.nbytes > self._buffers[turn].nbytes:  # one row longer than a piece
            self._buffers[turn] = torch.empty(piece.nbytes, dtype=torch.uint8, pin_memory=True)
        stored = self._buffers[turn][: piece.nbytes].view(piece.dtype).view(piece.target.shape)
        piece.fill(stored)
        with self._runtime.stream(self._stream):
            # Through the device where the type differs: the host would convert into memory that is not pinned.
            on_device = (
                stored if piece.dtype == piece.target.dtype else stored.to(piece.target.device, non_blocking=True)
            )
            piece.target.copy_(on_device, non_blocking=True)
            self._copied[turn].record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()
