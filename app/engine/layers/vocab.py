"""Token embedding and output head, the vocabulary split over the tensor-parallel ranks.

A vocabulary that does not divide is padded: the last ranks hold rows that no token uses, and logits are cut back to
[N, V].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.engine.layers.context import BuildContext
from app.engine.layers.layer import Layer
from app.engine.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape
from app.kernels.gemm import PackedWeight, linear_ops, pack_weight


class VocabShard(Layer):
    """This rank's rows of a [V, C] table."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp = ctx.groups.tp
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // self.tp.size)
        self.first = self.tp.rank * self.rows
        self.weight = Weight(torch.empty(self.rows, hidden_size, dtype=ctx.dtype), WeightSpec(self.load_weight))

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's rows; padding rows are zero."""
        expect_shape(tensor, self.vocab_size, *weight.shape[1:])
        held = max(0, min(self.rows, self.vocab_size - self.first))
        if held:
            tensor.read_into(weight.data[:held], 0, self.first)
        weight.data[held:].zero_()


class VocabEmbedding(VocabShard):
    """Token ids to hidden states."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, C]."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        foreign = (local < 0) | (local >= self.rows)
        hidden = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self.tp.all_reduce(hidden.masked_fill_(foreign.unsqueeze(-1), 0.0))


class LMHead(VocabShard):
    """Hidden states to logits."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int, bias: bool = False) -> None:
        super().__init__(ctx, vocab_size, hidden_size)
        self.bias = Weight(torch.empty(self.rows, dtype=ctx.dtype), WeightSpec(self.load_weight)) if bias else None
        self.tied = False
        self.packed: PackedWeight | None = None
        self.ops = linear_ops(ctx.device)

    def tie(self, embedding: VocabEmbedding) -> None:
        """Share the embedding's table (tied weights)."""
        self.weight = embedding.weight
        self.tied = True

    def pack(self) -> None:
        """Put the loaded table into the order of a faster kernel, where there is one.

        A tied table is then in memory twice, because the embedding reads rows of it.
        """
        self.packed = pack_weight(self.weight.data)
        if self.packed is not None and not self.tied:
            self.weight = self.weight.materialize(torch.device("meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], the whole vocabulary on every rank."""
        if self.packed is None:
            local = self.ops.linear(hidden, self.weight, self.bias)
        else:
            local = self.packed.linear(hidden, self.bias)
        logits = self.tp.all_gather(local)
        return logits[:, : self.vocab_size]
