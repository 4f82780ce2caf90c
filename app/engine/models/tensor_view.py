"""A tensor of a checkpoint in another shape than it is stored in: part of a fused one, transposed, or reordered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from app.engine.models.checkpoint import StoredTensor
from app.engine.models.reader import Piece


@dataclass(slots=True, frozen=True)
class ComputedTensor(StoredTensor):
    """What `make` makes of a stored tensor, all of which is read for any part."""

    make: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is made, found without reading."""
        return tuple(self.make(torch.empty(self.mapped.shape, device="meta")).shape)

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """See StoredTensor.narrow."""
        return self.make(self.mapped).narrow(dim, start, length).clone()

    def whole(self) -> torch.Tensor:
        """See StoredTensor.whole."""
        return self.make(self.mapped).clone()

    def read_into(self, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        """See StoredTensor.read_into."""

        def fill(buffer: torch.Tensor) -> None:
            buffer.copy_(self.make(self.mapped).narrow(dim, start, target.shape[dim]))

        if target.numel():
            self.reader.add(Piece(self.file, self.begin, self.mapped.dtype, target, fill))


def viewed(source: StoredTensor, part: torch.Tensor) -> StoredTensor:
    """A part of a tensor, given as a view of its `mapped`."""
    skipped = (part.storage_offset() - source.mapped.storage_offset()) * part.itemsize
    data = source.data if part.is_contiguous() else None
    return replace(source, mapped=part, begin=source.begin + int(skipped), data=data)


def rows(source: StoredTensor, start: int, length: int) -> StoredTensor:
    """Rows `start` to `start + length`."""
    return viewed(source, source.mapped.narrow(0, start, length))


def transposed(source: StoredTensor) -> StoredTensor:
    """A matrix the other way round."""
    return replace(source, mapped=source.mapped.t(), data=None)


def computed(source: StoredTensor, make: Callable[[torch.Tensor], torch.Tensor]) -> ComputedTensor:
    """What `make` makes of the whole tensor."""
    return ComputedTensor(source.name, source.file, source.mapped, source.begin, source.reader, None, make)


def split_rows(source: StoredTensor, sizes: Mapping[str, int]) -> Iterator[tuple[str, StoredTensor]]:
    """The parts of a fused tensor, one below the other; each gets all of a tensor that has no such rows."""
    start = 0
    for name, size in sizes.items():
        yield name, rows(source, start, size) if source.shape[:1] == (sum(sizes.values()),) else source
        start += size


def pairs_to_halves(source: StoredTensor, head_dim: int, rotary_dim: int) -> ComputedTensor:
    """Rows of heads whose rotating dimensions lie in pairs (RoFormer's order), those of each pair's first before those
    of its second, as `Rotation` has them; the scores stay the same."""

    def reorder(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(-1, head_dim, *x.shape[1:])
        turning = heads[:, :rotary_dim]
        return torch.cat((turning[:, 0::2], turning[:, 1::2], heads[:, rotary_dim:]), dim=1).reshape(x.shape)

    return computed(source, reorder)
