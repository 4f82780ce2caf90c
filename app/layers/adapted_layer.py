"""The contract of layers whose products adapters may change: linear layers, embeddings, output heads, classifiers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from app.checkpoints.tensors.leaf import Share
from app.distributed.parallel_groups import RankGroup
from app.layers.delta import Delta
from app.layers.quantized_layer import QuantizedLayer
from app.layers.weight import Weight

_SQUARED_AT_ONCE = 256  # inputs


class AdaptedLayer(QuantizedLayer, ABC):
    """A product x [T, K] W^T + b of this rank's shares. An embedding's x says which token each row is."""

    takes_delta: ClassVar[bool] = True  # whether its product is made here, and nowhere else
    delta_option: ClassVar[str | None] = None  # of the engine, without which it has no room for adapters
    delta: Delta | None = None  # what some rows of a step add to the product
    is_streamed = False  # its weight comes to where it lies just before it is read
    tp: RankGroup
    dtype: torch.dtype
    device: torch.device
    output_shares: Mapping[str, Share]  # N in all, of the parts by their names in the checkpoint ("": its own)
    input_share: Share  # K
    bias: Weight | None

    @property
    def adds_bias(self) -> bool:
        """True if this rank adds the bias: of ranks whose results are summed up, one does."""
        return True

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] W^T, [T, N]: this rank's share alone, with nothing added."""

    def squares(self) -> torch.Tensor:
        """Sums of each output's squared weights over this rank's inputs, fp32 [N], by whatever form multiplies."""
        size = self.input_share.size
        found = torch.zeros(sum(share.size for share in self.output_shares.values()), device=self.device)
        for first in range(0, size, _SQUARED_AT_ONCE):
            count = min(_SQUARED_AT_ONCE, size - first)
            chosen = torch.zeros(count, size, dtype=self.dtype, device=self.device)
            chosen.diagonal(first).fill_(1.0)
            found += self.multiply(chosen).float().square().sum(0)
        return found
