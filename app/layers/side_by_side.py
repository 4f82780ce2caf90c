"""Defines what a layer's projections of one input are: columns side by side, of one product or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class SideBySide:
    """Columns [T, W] as products gave them, one behind the other; none is copied until somebody wants them whole."""

    products: tuple[torch.Tensor, ...]  # [T, some of the columns] each

    def __len__(self) -> int:
        """T."""
        return len(self.products[0])

    def whole(self) -> torch.Tensor:
        """[T, W]."""
        return self.products[0] if len(self.products) == 1 else torch.cat(self.products, dim=1)

    def split(self, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """So many columns each, which lie in one product where they can."""
        left, found = list(self.products), []
        for width in widths:
            taken, missing = [], width
            while missing > 0:
                size = min(missing, left[0].shape[1])
                taken.append(left[0][:, :size])
                left[0], missing = left[0][:, size:], missing - size
                left = left[1:] if left[0].shape[1] == 0 else left
            found.append(taken[0] if len(taken) == 1 else torch.cat(taken, dim=1))
        return tuple(found)
