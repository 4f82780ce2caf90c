"""Linear layers over a tensor-parallel group.

Column layers split the output over the ranks, row layers the input (and sum up the ranks' results). Fused layers
(query-key-value, gate-up) hold several checkpoint tensors in one parameter. `Linear.forward` is the one place where
a weight meets an activation: packed (app/kernels/gemm) or quantized weights go there.
"""

from __future__ import annotations

import torch
from torch import nn

from app.engine.distributed.parallel_groups import RankGroup
from app.engine.layers.context import BuildContext
from app.engine.layers.norm import RMSNorm
from app.engine.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape, load_replicated
from app.kernels.fused import fused_ops
from app.kernels.gemm import PackedWeight, Rows, linear_ops, pack_weight, whole


class Linear(nn.Module):
    """y = x W^T + b on this rank's share: weight [output_size, input_size], bias [output_size]."""

    def __init__(
        self, ctx: BuildContext, input_size: int, output_size: int, bias: bool, parts: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.tp: RankGroup = ctx.groups.tp
        self.weight = Weight(torch.empty(output_size, input_size, dtype=ctx.dtype), WeightSpec(self.load_weight, parts))
        self.bias = (
            Weight(torch.empty(output_size, dtype=ctx.dtype), WeightSpec(self.load_bias, parts)) if bias else None
        )
        self.packed: PackedWeight | None = None
        self.quantization = ctx.quantization
        self.ops = linear_ops(ctx.device)

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Copy this rank's share of a checkpoint's weight."""
        raise NotImplementedError

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Copy this rank's share of a checkpoint's bias."""
        raise NotImplementedError

    def forward(self, x: Rows) -> torch.Tensor:
        """[T, input_size] -> [T, output_size]."""
        if self.packed is None:
            return self.ops.linear(x, self.weight, self.bias)
        return self.packed.linear(whole(x), self.bias)

    def pack(self) -> None:
        """Once the weight is loaded: quantize it, or put it into the order of a faster kernel, where there is one."""
        pack = pack_weight if self.quantization is None else self.quantization.pack
        self.packed = pack(self.weight.data)
        if self.packed is not None:
            self.weight = self.weight.materialize(torch.device("meta"))  # its shape stays, its memory is freed


class MergedColumnLinear(Linear):
    """Several outputs of one input side by side (gate and up), each split over the ranks."""

    def __init__(self, ctx: BuildContext, input_size: int, output_sizes: dict[str, int], bias: bool) -> None:
        tp = ctx.groups.tp
        self.shares = {name: tp.share_of(size, name) for name, size in output_sizes.items()}
        parts = tuple(output_sizes) if len(output_sizes) > 1 else ()
        super().__init__(ctx, input_size, sum(self.shares.values()), bias, parts)
        self.input_size = input_size
        self.silu_and_mul = fused_ops(ctx.device).silu_and_mul

    def gated(self, x: Rows) -> torch.Tensor:
        """Of two outputs, gate and up: silu(gate) * up, [T, output_size / 2]."""
        if self.packed is None:
            return self.ops.gated_linear(x, self.weight, self.bias)
        return self.silu_and_mul(self.packed.linear(whole(x), self.bias))

    def shard(self, shard_id: str) -> tuple[int, int, int]:
        """(offset in the parameter, rows in it, number of the share in the checkpoint's tensor)."""
        names = list(self.shares)
        index = names.index(shard_id) if shard_id else 0
        return sum(self.shares[name] for name in names[:index]), self.shares[names[index]], self.tp.rank

    def whole(self, shard_id: str) -> int:
        """Rows of the checkpoint's tensor."""
        return self.shares[shard_id or next(iter(self.shares))] * self.tp.size

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Rows of this rank."""
        expect_shape(tensor, self.whole(shard_id), self.input_size)
        self._load_rows(weight, tensor, shard_id)

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Entries of this rank."""
        expect_shape(tensor, self.whole(shard_id))
        self._load_rows(weight, tensor, shard_id)

    def _load_rows(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        offset, rows, share = self.shard(shard_id)
        weight.data.narrow(0, offset, rows).copy_(tensor.narrow(0, share * rows, rows))


class ColumnLinear(MergedColumnLinear):
    """One output, split over the ranks."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool) -> None:
        super().__init__(ctx, input_size, {"output": output_size}, bias)


class QKVLinear(MergedColumnLinear):
    """Query, key and value projections in one. Where there are more ranks than KV heads, ranks share a head."""

    def __init__(
        self, ctx: BuildContext, input_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool
    ) -> None:
        tp = ctx.groups.tp
        self.kv_copies = max(1, tp.size // num_kv_heads)  # ranks that hold the same KV head
        self.num_heads = tp.share_of(num_heads, "num_attention_heads")
        self.num_kv_heads = tp.share_of(num_kv_heads * self.kv_copies, "num_key_value_heads")
        self.whole_kv = num_kv_heads * head_dim
        kv_size = num_kv_heads * self.kv_copies * head_dim
        sizes = {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(ctx, input_size, sizes, bias)

    def shard(self, shard_id: str) -> tuple[int, int, int]:
        """As for merged columns, but ranks that share a KV head read the same share."""
        offset, rows, share = super().shard(shard_id)
        return offset, rows, share if shard_id == "q_proj" else share // self.kv_copies

    def whole(self, shard_id: str) -> int:
        """Rows of the checkpoint's tensor."""
        return super().whole(shard_id) if shard_id == "q_proj" else self.whole_kv


class RowLinear(Linear):
    """The input is split over the ranks; the results are summed up."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool) -> None:
        self.whole_input = input_size
        super().__init__(ctx, ctx.groups.tp.share_of(input_size, "input_size"), output_size, bias, ())

    def load_weight(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Columns of this rank."""
        rows, columns = weight.shape
        expect_shape(tensor, rows, self.whole_input)
        weight.data.copy_(tensor.narrow(1, self.tp.rank * columns, columns))

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """The bias is added once: by rank 0."""
        load_replicated(weight, tensor, shard_id)
        if self.tp.rank > 0:
            weight.data.zero_()

    def forward(self, x: Rows) -> torch.Tensor:
        """[T, input_size / ranks] -> [T, output_size], the same on every rank."""
        return self.tp.all_reduce(super().forward(x))

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm | None) -> tuple[Rows, torch.Tensor]:
        """x [T, input_size / ranks], residual [T, output_size] -> (the norm of their product's sum with the residual,
        that sum), both [T, output_size]; no norm: the sum twice."""
        if norm is None:
            total = self(x) + residual
            return total, total
        if self.packed is not None or self.tp.size > 1:
            return norm.after_add(self(x), residual)
        return self.ops.linear_add_norm(x, self.weight, self.bias, residual, norm.weight, norm.eps, norm.may_be_late)
