"""Tensors of a checkpoint by name, of which only what is asked for is read: at once, or by the reader's threads."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.checkpoints.tensors.leaf import Leaf
from app.checkpoints.tensors.reader import PIECE_BYTES, Fill, Piece, Reader
from app.errors import CheckpointError


class DataFile:
    """A file that several threads read from, each at places of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}", param="model") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, buffer: torch.Tensor, offset: int) -> None:
        """Fill a contiguous tensor on the CPU with the bytes at `offset`; CheckpointError where they are not there."""
        # Not `numpy()`, after which the tensor's storage could not be emptied (sleep).
        left = memoryview((ctypes.c_char * (buffer.numel() * buffer.itemsize)).from_address(buffer.data_ptr())).cast(
            "B"
        )
        while left:
            try:
                count = os.preadv(self._descriptor, [left], offset)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {error.strerror}", param="model") from None
            if not count:
                raise CheckpointError(f"cannot read {self.path}: it became shorter meanwhile", param="model")
            left, offset = left[count:], offset + count


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """One tensor in a file.

    `mapped` is all of it on the CPU, of which nothing is read yet and to which nobody may write. It begins at the byte
    `begin` of its file; where its bytes lie there as they are, `data` reads them, which is faster than the map.
    """

    name: str
    file: Path
    mapped: torch.Tensor
    begin: int
    reader: Reader
    data: DataFile | None = None
    leaf: Leaf | None = None  # what a quantized layer stores it as; None: a dimension of outputs first, if any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.mapped.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type it is stored in."""
        return self.mapped.dtype

    def reshaped(self, *shape: int) -> StoredTensor:
        """The same numbers in the same order under another shape; CheckpointError where there are others."""
        try:
            return replace(self, mapped=self.mapped.reshape(shape))
        except RuntimeError:
            what = f"{self.name} has shape {list(self.shape)}, whose numbers do not fill {list(shape)}"
            raise CheckpointError(what, param="model") from None

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Read `length` entries from `start` along `dim`, now."""
        return self.mapped.narrow(dim, start, length).clone()

    def whole(self) -> torch.Tensor:
        """Read all of it, now; also where it has no dimensions."""
        return self.mapped.clone()

    def read_into(self, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        """Have the entries from `start` along `dim`, as many as `target` has there, read into it by `Reader.read`."""
        if not target.numel():
            return
        source = self.mapped.narrow(dim, start, target.shape[dim]) if target.ndim else self.mapped
        if source.is_contiguous() and target.is_contiguous():
            source, target = source.view(-1), target.view(-1)
        rows = max(1, PIECE_BYTES // (source[0].numel() * source.itemsize))
        for first in range(0, len(source), rows):
            part = source[first : first + rows]
            offset = self.begin + int(part.storage_offset() - self.mapped.storage_offset()) * part.itemsize
            place = target[first : first + rows]
            self.reader.add(Piece(self.file, offset, part.dtype, place, self._fill(part, offset)))

    def _fill(self, part: torch.Tensor, offset: int) -> Fill:
        data = self.data
        if data is None or not part.is_contiguous():
            return lambda buffer: buffer.copy_(part)
        return lambda buffer: data.read_into(buffer, offset)
