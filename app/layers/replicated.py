"""Small layers that every rank holds in full: tables of positions, heads of classifiers, gates."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.tensors.leaf import Share
from app.distributed.parallel_groups import RankGroup
from app.errors import UnsupportedError
from app.kernels.gemm import LINEAR_OPS
from app.layers.adapted_layer import AdaptedLayer
from app.layers.context import BuildContext
from app.layers.quantized_layer import LayerPart
from app.layers.stored_weight import StoredWeight
from app.layers.weight import REPLICATED, Weight
from app.quantization.base import QuantMethod
from app.quantization.plain import PLAIN_METHOD


class ReplicatedTable(nn.Module):
    """A table of [N, C], looked up by index."""

    def __init__(self, ctx: BuildContext, size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(size, hidden_size, dtype=ctx.dtype), REPLICATED)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, C]."""
        return F.embedding(indices, self.weight)


class ReplicatedLinear(AdaptedLayer):
    """y = x W^T + b. What is stored in a quantized form is dequantized at load."""

    stays_plain = True
    tp = RankGroup()  # each rank adds up all of it
    weight: Weight  # where a quantization method stores a leaf of this name

    def __init__(
        self,
        ctx: BuildContext,
        input_size: int,
        output_size: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`dtype`: of the weight; None: the model's. `parts`: the outputs of checkpoints' layers that lie side by side
        in this one, by their names; none: it is one itself."""
        super().__init__()
        self.dtype, self.device = dtype or ctx.dtype, ctx.device
        self.input_share = Share(0, input_size, 0, input_size)
        sizes = dict(parts) or {"": output_size}
        ends = accumulate(sizes.values())
        self.output_shares = {
            part: Share(end - size, size, 0, size) for (part, size), end in zip(sizes.items(), ends, strict=True)
        }
        self.stored = StoredWeight(self, PLAIN_METHOD, self.output_shares, self.input_share, self.dtype)
        self.bias = Weight(torch.empty(output_size, dtype=ctx.dtype), REPLICATED) if bias else None
        self.dequantized: torch.Tensor | None = None  # [N, K], of a quantized one
        self.product = LINEAR_OPS.on(ctx.device, exact=True).linear if ctx.is_exact else F.linear

    @property
    def quantized_parts(self) -> Mapping[str, LayerPart]:
        """See QuantizedLayer."""
        return {
            part: LayerPart(share.whole, self.input_share.whole, self.bias is not None)
            for part, share in self.output_shares.items()
        }

    def store(self, methods: Mapping[str, QuantMethod]) -> None:
        """See QuantizedLayer."""
        method = methods[next(iter(self.output_shares))]
        if any(other != method for other in methods.values()):
            raise UnsupportedError(f"{', '.join(methods)} are stored unlike", param="model")
        self.stored.remove()
        self.stored = StoredWeight(self, method, self.output_shares, self.input_share, self.dtype)

    def pack(self) -> None:
        """Dequantize; a plain weight multiplies as it was loaded."""
        if not self.stored.is_plain:
            self.dequantized = self.stored.form().dequantize().to(self.dtype)
            self.stored.drop()

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self.dequantized

    def drop_packed(self) -> None:
        """See QuantizedLayer."""
        self.dequantized = None

    @property
    def multiplier(self) -> torch.Tensor:
        """[N, K]."""
        return self.weight if self.dequantized is None else self.dequantized

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See AdaptedLayer."""
        return self.product(x, self.multiplier, None)

    def squares(self) -> torch.Tensor:
        """See AdaptedLayer."""
        return self.multiplier.float().square().sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, input_size] -> [N, output_size], in the weights' type."""
        x = x.to(self.dtype)
        y = self.product(x, self.multiplier, self.bias)
        return self.delta.add(x, y) if self.delta is not None and self.delta.is_wanted else y
