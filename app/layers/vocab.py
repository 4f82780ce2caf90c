"""Token embedding and output head, the vocabulary split over the tensor-parallel ranks.

A vocabulary that does not divide is padded: the last ranks hold rows that no token uses, and logits are cut back to
[N, V].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F

from app.checkpoints.tensors.leaf import Share
from app.kernels.gemm import LINEAR_OPS, PackedWeight, pack_weight
from app.kernels.gemm.leaves import LEAVES
from app.layers.adapted_layer import AdaptedLayer
from app.layers.context import BuildContext
from app.layers.packing import Packing
from app.layers.quantized_layer import LayerPart
from app.layers.stored_weight import StoredWeight, pack_stored
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape
from app.quantization.base import QuantMethod
from app.quantization.plain import PLAIN_METHOD


class VocabShard(AdaptedLayer):
    """This rank's rows of a [V, C] table."""

    delta_option = "lora_extras"
    weight: Weight  # where a quantization method stores a leaf of this name

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp = ctx.groups.tp
        self.dtype, self.device = ctx.dtype, ctx.device
        self.vocab_size = vocab_size
        shares = LEAVES if ctx.has_leaves else self.tp.size
        self.rows = -(-vocab_size // shares) * shares // self.tp.size
        self.first = self.tp.rank * self.rows
        self.held = max(0, min(self.rows, vocab_size - self.first))  # rows that are tokens'
        self.inputs = Share(0, hidden_size, 0, hidden_size)
        self.tokens = Share(0, self.held, min(self.first, vocab_size), vocab_size)
        self.stored: StoredWeight | None = None  # None: a plain table
        self.weight = Weight(torch.empty(self.rows, hidden_size, dtype=ctx.dtype), WeightSpec(self.load_weight))

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's rows; padding rows are zero."""
        expect_shape(tensor, self.vocab_size, *weight.shape[1:])
        if self.held:
            tensor.read_into(weight.data[: self.held], 0, self.first)
        weight.data[self.held :].zero_()

    @property
    @abstractmethod
    def table(self) -> torch.Tensor:
        """The rows of this rank, [rows, C]."""

    @property
    def quantized_parts(self) -> Mapping[str, LayerPart]:
        """See QuantizedLayer."""
        return {"": LayerPart(self.vocab_size, self.inputs.size)}

    def store(self, methods: Mapping[str, QuantMethod]) -> None:
        """See QuantizedLayer."""
        if methods[""] is PLAIN_METHOD:
            return
        del self.weight
        self.stored = StoredWeight(self, methods[""], {"": self.tokens}, self.inputs, self.dtype)


class VocabEmbedding(VocabShard):
    """Token ids to hidden states. A quantized table is dequantized once it is loaded."""

    kind = "embedding"

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__(ctx, vocab_size, hidden_size)
        self.dequantized: torch.Tensor | None = None  # [rows, C], of a quantized table
        self.output_shares, self.input_share, self.bias = {"": self.inputs}, self.tokens, None
        self._tied: tuple[LMHead, ...] = ()  # the head that shares the table; no module of this one

    @property
    def table(self) -> torch.Tensor:
        """See VocabShard."""
        return self.weight if self.dequantized is None else self.dequantized

    def store(self, methods: Mapping[str, QuantMethod]) -> None:
        """See QuantizedLayer."""
        super().store(methods)
        if self.stored is not None:
            for head in self._tied:
                del head.weight

    def share_with(self, head: LMHead) -> None:
        """Have a head read the same table."""
        self._tied = (head,)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, C]."""
        weight = self.table
        if self.tp.size == 1:
            return self._adapted(token_ids, F.embedding(token_ids, weight))
        local = token_ids - self.first
        own = local.clamp(0, self.rows - 1)
        others = own != local
        hidden = F.embedding(own, weight).masked_fill_(others.unsqueeze(-1), 0.0)
        return self.tp.all_reduce(self._adapted(local.masked_fill(others, -1), hidden))

    def _adapted(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's tokens, by their places in its table; -1: another rank's."""
        if self.delta is None or not self.delta.is_wanted:
            return hidden
        return self.delta.add(token_ids.flatten(), hidden.flatten(0, -2)).view_as(hidden)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See AdaptedLayer: x weighs the tokens."""
        return x @ self.table[: self.held]

    def squares(self) -> torch.Tensor:
        """See AdaptedLayer."""
        return self.table[: self.held].float().square().sum(0)

    def pack(self) -> None:
        """Dequantize."""
        if self.stored is None:
            return
        table = self.stored.form().dequantize().to(self.dtype)
        self.dequantized = F.pad(table, (0, 0, 0, self.rows - self.held))
        self.stored.drop()

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self.dequantized

    def drop_packed(self) -> None:
        """See QuantizedLayer."""
        self.dequantized = None


class LMHead(VocabShard):
    """Hidden states to logits."""

    kind = "head"

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int, bias: bool = False) -> None:
        super().__init__(ctx, vocab_size, hidden_size)
        self.bias = Weight(torch.empty(self.rows, dtype=ctx.dtype), WeightSpec(self.load_weight)) if bias else None
        self.output_shares, self.input_share = {"": self.tokens}, self.inputs
        self.tied = False
        self.packed: PackedWeight | None = None
        self.ops = ctx.kernels(LINEAR_OPS)
        self.packing = Packing.of(ctx, self.ops)

    @property
    def quantized_parts(self) -> Mapping[str, LayerPart]:
        """See QuantizedLayer; none of its own where it shares the embedding's."""
        return {} if self.tied else {"": LayerPart(self.vocab_size, self.inputs.size, self.bias is not None)}

    def tie(self, embedding: VocabEmbedding) -> None:
        """Share the embedding's table (tied weights)."""
        self.weight = embedding.weight
        self._embedding = (embedding,)  # no module of this one
        embedding.share_with(self)
        self.tied = True

    @property
    def table(self) -> torch.Tensor:
        """See VocabShard."""
        return self._embedding[0].table if self.tied else self.weight

    def pack(self) -> None:
        """Put the loaded table into the order of a faster kernel, where there is one.

        A tied table is then in memory twice, because the embedding reads rows of it.
        """
        if self.stored is not None:
            packed = pack_stored([self.stored]) if self.held else None
            self.packed = self.packing.by_rows(packed, self.held, self.inputs.size)
            self.stored.drop()
            return
        whole = partial(pack_weight, self.table.data)
        self.packed = self.packing.packed(whole, self._in_leaves, self.rows, self.inputs.size)
        if self.packed is not None and not self.tied:
            self.weight = self.weight.materialize(torch.device("meta"))

    def _in_leaves(self) -> PackedWeight | None:
        """See Linear."""
        return self.packing.columns(self.table.data, [Share(0, self.rows, self.first, self.rows * self.tp.size)])

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self.packed

    def drop_packed(self) -> None:
        """See QuantizedLayer."""
        self.packed = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], the whole vocabulary on every rank."""
        local = self._local(hidden, self.bias)
        if self.delta is not None and self.delta.is_wanted:
            local = self.delta.add(hidden, local)
        logits = self.tp.all_gather(local)
        return logits[:, : self.vocab_size]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See AdaptedLayer."""
        return self._local(x, None)[:, : self.held]

    def squares(self) -> torch.Tensor:
        """See AdaptedLayer."""
        if self.stored is not None or self.packed is not None:
            return super().squares()
        return self.table[: self.held].float().square().sum(1)

    def _local(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.stored is not None:
            return self._quantized(hidden, bias)
        if self.packed is None:
            return self.ops.linear(hidden, self.table, bias)
        return self.packed.linear(hidden, bias)

    def _quantized(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Logits of the rows that tokens have, and zeros for the others."""
        if self.packed is None:
            return hidden.new_zeros(hidden.shape[0], self.rows)
        bias = None if bias is None else bias[: self.held]
        return F.pad(self.packed.linear(hidden, bias), (0, self.rows - self.held))
