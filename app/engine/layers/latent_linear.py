"""The projections that only latent attention has."""

from __future__ import annotations

import torch

from app.engine.layers.context import BuildContext
from app.engine.layers.linear import ColumnLinear, MergedColumnLinear
from app.errors import UnsupportedError

_LATENT = "kv_a_proj_with_mqa"


class LatentInputLinear(MergedColumnLinear):
    """Queries, or the latent that they are made of, and the latent of keys and values in one product.

    Latents are the same on every rank; queries are split by heads.
    """

    def __init__(
        self, ctx: BuildContext, input_size: int, query_size: int, query_rank: int | None, width: int, bias: bool
    ) -> None:
        if bias and query_rank is None:
            raise UnsupportedError("attention_bias without q_lora_rank: only the latents would have one", param="model")
        tp = ctx.groups.tp.size
        # Every rank has the same share of a latent, which is all of it.
        query = {"q_proj": query_size} if query_rank is None else {"q_a_proj": query_rank * tp}
        super().__init__(ctx, input_size, {**query, _LATENT: width * tp}, bias)

    @property
    def sizes(self) -> list[int]:
        """Numbers of each output on this rank."""
        return list(self.shares.values())

    def shard(self, shard_id: str) -> tuple[int, int, int]:
        """The only share of a latent is number 0."""
        offset, rows, share = super().shard(shard_id)
        return offset, rows, share if shard_id == "q_proj" else 0

    def whole(self, shard_id: str) -> int:
        """Rows of the checkpoint's tensor."""
        return super().whole(shard_id) if shard_id == "q_proj" else self.shares[shard_id]


class LatentUpLinear(ColumnLinear):
    """`kv_b_proj`: keys and values of heads as functions of the latent. The functions of the keys are also applied the
    other way round, so they are kept as they are: what is stored in a quantized form is dequantized at load."""

    def __init__(self, ctx: BuildContext, latent_size: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
        super().__init__(ctx, latent_size, num_heads * (nope_dim + value_dim), bias=False)
        self.dims = (nope_dim, value_dim)
        self.dtype = ctx.dtype

    def pack(self) -> None:
        """Nothing: it multiplies as it was loaded. UnsupportedError for a quantized one."""
        if [leaf.name for leaf in self.leaves] != ["weight"] or self.weight.dtype != self.dtype:
            raise UnsupportedError("kv_b_proj of latent attention is quantized in this checkpoint", param="model")

    @property
    def heads(self) -> torch.Tensor:
        """[H, Dn + Dv, R]: of each head the rows of its key, then those of its value."""
        return self.weight.view(-1, sum(self.dims), self.input_size)
