"""The projections that only latent attention has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from app.kernels.gemm.parts import UnpackedWeight
from app.layers.context import BuildContext
from app.layers.linear import ColumnLinear, MergedColumnLinear
from app.layers.quantized_layer import LayerPart
from app.layers.weight import CheckpointTensor, Weight, WeightSpec

_LATENT, _QUERY = "kv_a_proj_with_mqa", "q_proj"


class LatentInputLinear(MergedColumnLinear):
    """Queries, or the latent that they are made of, and the latent of keys and values in one product.

    Latents are the same on every rank; queries are split by heads. `bias` is the latents'.
    """

    def __init__(
        self, ctx: BuildContext, input_size: int, query_size: int, query_rank: int | None, width: int, bias: bool
    ) -> None:
        latents = {_LATENT: width} if query_rank is None else {"q_a_proj": query_rank, _LATENT: width}
        query = {_QUERY: query_size} if query_rank is None else {}
        copies = dict.fromkeys(latents, ctx.groups.tp.size)
        super().__init__(ctx, input_size, {**query, **latents}, bias, copies)
        if self.bias is not None:
            self.bias = Weight(self.bias.data, WeightSpec(self.load_bias, tuple(latents)))

    @property
    def quantized_parts(self) -> Mapping[str, LayerPart]:
        """See QuantizedLayer."""
        parts = super().quantized_parts
        return {name: replace(part, has_bias=part.has_bias and name != _QUERY) for name, part in parts.items()}

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """See Linear; queries that are projected at once have none."""
        super().load_bias(weight, tensor, shard_id)
        if _QUERY in self.output_shares:
            weight.data[: self.output_shares[_QUERY].size].zero_()

    @property
    def sizes(self) -> list[int]:
        """Numbers of each output on this rank."""
        return list(self.shares.values())


class LatentUpLinear(ColumnLinear):
    """`kv_b_proj`: keys and values of heads as functions of the latent. The functions of the keys are also applied the
    other way round, so they are kept as they are: what is stored in a quantized form is dequantized at load."""

    takes_delta = False

    def __init__(self, ctx: BuildContext, latent_size: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
        super().__init__(ctx, latent_size, num_heads * (nope_dim + value_dim), bias=False)
        self.dims = (nope_dim, value_dim)
        self.dequantized: torch.Tensor | None = None  # [N, K], of a quantized one

    def pack(self) -> None:
        """Dequantize; a plain weight multiplies as it was loaded."""
        if len(self.stored) == 1 and self.stored[0].is_plain:
            return
        self.dequantized = self.stored[0].form().dequantize().to(self.dtype)
        self.packed = UnpackedWeight(self.dequantized)
        for weight in self.stored:
            weight.drop()

    def drop_packed(self) -> None:
        """See QuantizedLayer."""
        super().drop_packed()
        self.dequantized = None

    @property
    def heads(self) -> torch.Tensor:
        """[H, Dn + Dv, R]: of each head the rows of its key, then those of its value."""
        weight = self.weight if self.dequantized is None else self.dequantized
        return weight.view(-1, sum(self.dims), self.input_share.size)
