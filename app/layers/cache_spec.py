"""Describes what one layer keeps, of each token or of each request: the layer says it, and memory, tensors and copies
follow."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(slots=True, frozen=True)
class LayerCacheSpec:
    """A block of S tokens is a tensor [*planes, S, width]: keys and values of Hkv heads are planes (2, Hkv) of vectors
    of D numbers; a layer that keeps one latent vector of a token has no planes."""

    planes: tuple[int, ...]
    width: int
    dtype: torch.dtype
    sliding_window: int | None = None  # tokens that are read again, the token itself included; None: all
    # Positions of an encoder's output that it keeps of each request, instead of the request's tokens; None: these.
    encoder_positions: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token."""
        return prod(self.planes) * self.width * self.dtype.itemsize

    def num_encoder_blocks(self, block_size: int) -> int:
        """Blocks that hold what it keeps of an encoder's output for one request."""
        return -(-(self.encoder_positions or 0) // block_size)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """The shape of one block."""
        return (*self.planes, block_size, self.width)


@dataclass(slots=True, frozen=True)
class StateTensor:
    """One kind of state, as the inputs of a convolution or what a recurrence goes on from."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of one request."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, frozen=True)
class LayerStateSpec:
    """A layer's states of one request, which take the same memory however long it is."""

    tensors: tuple[StateTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of one request."""
        return sum(tensor.num_bytes for tensor in self.tensors)
