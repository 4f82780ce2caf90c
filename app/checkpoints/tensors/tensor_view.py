"""A tensor of a checkpoint in another shape than it is stored in: part of a fused one, transposed, or reordered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.leaf import Dim, Share
from app.checkpoints.tensors.reader import Piece
from app.errors import CheckpointError, UnsupportedError


@dataclass(slots=True, frozen=True)
class ComputedTensor(StoredTensor):
    """A tensor that `make` computes from a stored one, all of which is read for any part."""

    make: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is made."""
        return tuple(self._sample.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is made."""
        return self._sample.dtype

    @property
    def _sample(self) -> torch.Tensor:
        """Makes the result of a tensor without numbers: nothing is read."""
        return self.make(torch.empty(self.mapped.shape, dtype=self.mapped.dtype, device="meta"))

    def reshaped(self, *shape: int) -> ComputedTensor:
        """See StoredTensor.reshaped."""
        return replace(self, make=lambda x: self.make(x).reshape(shape))

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
            self.reader.add(Piece(self.file, self.begin, self.dtype, target, fill))


def viewed(source: StoredTensor, part: torch.Tensor) -> StoredTensor:
    """A part of a tensor, given as a view of its `mapped`."""
    skipped = (part.storage_offset() - source.mapped.storage_offset()) * part.itemsize
    data = source.data if part.is_contiguous() else None
    return replace(source, mapped=part, begin=source.begin + int(skipped), data=data)


def rows(source: StoredTensor, start: int, length: int) -> StoredTensor:
    """Outputs `start` to `start + length`."""
    axis, dim = _outputs(source)
    share = dim.cover(Share(0, length, start, source.shape[axis] * dim.per // dim.entries))
    if start % dim.per or (length % dim.per and share.start + share.size < share.whole):
        raise UnsupportedError(f"{source.name}: its parts begin within {dim.per} outputs that lie together")
    return viewed(source, source.mapped.narrow(axis, share.start, share.size))


def transposed(source: StoredTensor) -> StoredTensor:
    """A matrix the other way round."""
    return replace(source, mapped=source.mapped.t(), data=None)


def computed(source: StoredTensor, make: Callable[[torch.Tensor], torch.Tensor]) -> ComputedTensor:
    """Returns the tensor that `make` computes from the whole of a stored one, or of what was computed from it."""
    if isinstance(source, ComputedTensor):
        before = source.make
        return replace(source, make=lambda x: make(before(x)))
    return ComputedTensor(source.name, source.file, source.mapped, source.begin, source.reader, None, source.leaf, make)


def split_rows(source: StoredTensor, sizes: Mapping[str, int]) -> Iterator[tuple[str, StoredTensor]]:
    """The parts of a fused tensor, their outputs one after the other; each gets all of a tensor without outputs."""
    start, whole = 0, sum(sizes.values())
    if source.leaf is not None and source.leaf.any_shape and source.leaf.output == (0, source.leaf.dims[0]):
        source = source.reshaped(source.leaf.dims[0].count(whole), -1)
    for name, size in sizes.items():
        yield name, rows(source, start, size) if _has_outputs(source, whole) else source
        start += size


def rows_of(source: StoredTensor, choose: Callable[[torch.Tensor], torch.Tensor]) -> StoredTensor:
    """The rows of outputs that `choose` takes of all of them (any tensor with a first dimension of outputs), in its
    order. UnsupportedError where rows are stored together that do not stay together."""
    if source.leaf is None or source.leaf.dims[:1] == (Dim("output"),):
        return computed(source, choose)
    if source.leaf.output is None:
        return source
    axis, dim = source.leaf.output
    blocks = choose(torch.arange(source.shape[axis] * dim.per // dim.entries, device="cpu"))
    blocks = blocks.view(-1, dim.per) if blocks.numel() % dim.per == 0 else blocks[None]
    entries, places = blocks // dim.per, blocks % dim.per
    stay = dim.entries == 1 and blocks.shape[1] == dim.per and bool((entries == entries[:, :1]).all())
    if not stay or (not source.dtype.is_floating_point and bool((places != torch.arange(dim.per)).any())):
        raise UnsupportedError(f"{source.name}: {dim.per} outputs lie together that the model needs in another order")
    return computed(source, lambda x: x.index_select(axis, entries[:, 0]))


def split_heads(source: StoredTensor, num_heads: int, sizes: Mapping[str, int]) -> Iterator[tuple[str, StoredTensor]]:
    """The parts of a fused tensor whose rows lie head by head, each of all heads."""
    width, first = sum(sizes.values()), 0
    for name, size in sizes.items():
        places = slice(first, first + size)

        def choose(x: torch.Tensor, places: slice = places) -> torch.Tensor:
            if len(x) != num_heads * width:
                raise CheckpointError(f"{source.name} has {len(x)} rows, not {num_heads * width}", param="model")
            return x.view(num_heads, width, *x.shape[1:])[:, places].flatten(0, 1)

        yield name, rows_of(source, choose)
        first += size


def _outputs(source: StoredTensor) -> tuple[int, Dim]:
    output = (0, Dim("output")) if source.leaf is None else source.leaf.output
    assert output is not None, f"{source.name} has no outputs"
    return output


def _has_outputs(source: StoredTensor, size: int) -> bool:
    """True if a tensor has a dimension of `size` outputs."""
    if source.leaf is not None and source.leaf.output is None:
        return False
    axis, dim = _outputs(source)
    return len(source.shape) > axis and source.shape[axis] == dim.count(size)


def pairs_to_halves(source: StoredTensor, head_dim: int, rotary_dim: int) -> StoredTensor:
    """Rows of heads whose rotating dimensions lie in pairs (RoFormer's order), those of each pair's first before those
    of its second, as `Rotation` has them; the scores stay the same."""

    def reorder(x: torch.Tensor) -> torch.Tensor:
        if len(x) % head_dim:
            raise CheckpointError(f"{source.name} has {len(x)} rows, no heads of {head_dim}", param="model")
        heads = x.reshape(-1, head_dim, *x.shape[1:])
        turning = heads[:, :rotary_dim]
        return torch.cat((turning[:, 0::2], turning[:, 1::2], heads[:, rotary_dim:]), dim=1).reshape(x.shape)

    return rows_of(source, reorder)
