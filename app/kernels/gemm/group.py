"""Weights of 2 to 8 bits that groups of inputs share a scale and a zero of (GPTQ: Frantar et al., 2022; AWQ: Lin et
al., 2023), times activations as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from app.kernels.gemm.stored import Form, StoredTiles, bits_of, block_for, groups_first, pack_words, within_range
from app.kernels.gemm.tiled import TiledWeight

_LARGE_GROUP = 64  # inputs: four bytes of a scale for as many do not count


@dataclass(slots=True, frozen=True)
class GroupWeight(TiledWeight):
    """w = q * scale + offset."""

    tiles: StoredTiles
    # int64 [K]: column k of the weight is for input order[k]. An input may come again with a column of zeros.
    order: torch.Tensor | None = None

    @property
    def stored(self) -> StoredTiles:
        """See TiledWeight."""
        return self.tiles

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor | None,
        bits: int,
        order: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        group: int | None = None,
    ) -> GroupWeight:
        """q uint8 [N, K] below 2^bits, scale and offset [N, groups]; no offset: -2^(bits - 1) * scale. Up to 4 bits are
        stored in 4, more in 8. Scales are kept in 16 bits where that rounds none, or where groups are small and `dtype`
        has 16.

        group: inputs that share a scale; left out, K / groups, rounded up.
        """
        form: Form = "nibble" if bits <= 4 else "int8"
        middle, own = 1 << (bits - 1), 1 << (bits_of(form) - 1)
        group = group or -(-q.shape[1] // scale.shape[1])
        if offset is not None and torch.equal(offset.float(), -middle * scale.float()):
            offset = None  # a kernel has less to do
        q = q + (own - middle)  # never beyond the stored bits: the middle becomes the middle
        if offset is not None:
            offset = offset.float() + middle * scale.float()  # no larger than the weights are
        if form == "int8":
            q = q ^ 0x80
        block = block_for(form, group)
        sizes = q.shape[1], block, group
        tiles = StoredTiles(
            form, pack_words(q, form, block), groups_first(_narrow(scale, group, dtype), *sizes),
            None if offset is None else groups_first(_narrow(offset, group, dtype), *sizes), None, *sizes,
        )  # fmt: skip
        return cls(tiles, order)

    @property
    def keeps_inputs(self) -> bool:
        """See TiledWeight."""
        return self.order is None

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x's columns in the weight's order."""
        return x if self.order is None else x.index_select(1, self.order)

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32 [N, K], its columns in the inputs' order."""
        return of_inputs(self.tiles.dequantize(), self.order)


def made_alike(weights: Sequence[GroupWeight]) -> list[GroupWeight]:
    """The same weights with scales of one type, and offsets of one type or none. `GroupWeight.of` chooses by the
    numbers: of a layer's experts one may happen to have none but zeros in the middle, or those of one rank offsets that
    16 bits hold."""
    scale_type = reduce(torch.promote_types, (one.tiles.scales.dtype for one in weights))
    offsets = [one.tiles.offsets for one in weights]
    types = [offset.dtype for offset in offsets if offset is not None]
    if not types:
        return [replace(one, tiles=replace(one.tiles, scales=one.tiles.scales.to(scale_type))) for one in weights]
    is_large = weights[0].tiles.group >= _LARGE_GROUP
    offset_type = torch.float32 if is_large else reduce(torch.promote_types, types)
    made = []
    for one, offset in zip(weights, offsets, strict=True):
        scales = one.tiles.scales.to(scale_type)
        full = torch.zeros_like(scales, dtype=offset_type) if offset is None else offset.to(offset_type)
        made.append(replace(one, tiles=replace(one.tiles, scales=scales, offsets=full)))
    return made


def of_inputs(weight: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Columns [N, K'] of which column k is for input order[k], as one for each input: [N, K]. All inputs are named;
    columns of 0 name one again."""
    if order is None:
        return weight
    return weight.new_zeros(len(weight), int(order.max()) + 1).index_add_(1, order, weight)


def _narrow(groups: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, groups] in 16 bits, where `of` says so."""
    for half in (torch.float16, torch.bfloat16):
        if torch.equal(groups.to(half).to(groups.dtype), groups):
            return groups.to(half)
    return within_range(groups, dtype) if group < _LARGE_GROUP else groups
