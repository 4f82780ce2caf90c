"""Weights of 4 bits that stand for the 16 numbers of a table (QLoRA's nf4: Dettmers et al., 2023; OCP's e2m1; a table
for each row, SqueezeLLM: Kim et al., 2023), groups of which share a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.gemm.stored import (
    E2M1,
    Form,
    StoredTiles,
    block_for,
    exponent_words,
    groups_first,
    pack_words,
    within_range,
)
from app.kernels.gemm.tiled import TiledWeight

MX_GROUP = 32  # inputs that share a power of two


@dataclass(slots=True, frozen=True)
class TableWeight(TiledWeight):
    """w = table[code] * scale."""

    tiles: StoredTiles

    @property
    def stored(self) -> StoredTiles:
        """See TiledWeight."""
        return self.tiles

    @classmethod
    def of(
        cls,
        codes: torch.Tensor,
        table: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        *,
        group: int | None = None,
    ) -> TableWeight:
        """codes uint8 [N, K] below 16, table [16] or [N, 16], scale [N, groups]; table and scales are kept in `dtype`,
        scales beyond its range in fp32, powers of two for groups of OCP's size as exponents.

        group: inputs that share a scale; left out, K / groups, rounded up.
        """
        is_e2m1 = table.dim() == 1 and torch.equal(table.float().cpu(), E2M1)
        form: Form = "e2m1" if is_e2m1 else "table"
        group = group or -(-codes.shape[1] // scale.shape[1])
        block = block_for(form, group)
        sizes = codes.shape[1], block, group
        exponents = exponent_words(groups_first(scale.float(), *sizes)) if is_e2m1 and group == MX_GROUP else None
        scales = groups_first(within_range(scale, dtype), *sizes) if exponents is None else exponents
        tiles = StoredTiles(
            form, pack_words(codes, form, block), scales, None,
            None if is_e2m1 else table.to(dtype).contiguous(), *sizes,
        )  # fmt: skip
        return cls(tiles)
