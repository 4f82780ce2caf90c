"""Linear layers over a tensor-parallel group.

Column layers split the output over the ranks, row layers the input and sum up the ranks' results (Megatron-LM: Shoeybi
et al., 2019). Fused layers (query-key-value, gate-up) hold several checkpoint tensors in one parameter. Which tensors
are stored, the layer's quantization method says; how they are split follows from their dimensions. `Linear.forward` is
the one place where a weight meets an activation, and the one exit: what follows the product comes as its epilogue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from app.engine.distributed.parallel_groups import RankGroup
from app.engine.layers.context import BuildContext
from app.engine.layers.epilogue import PLAIN, Epilogue
from app.engine.layers.layer import Layer
from app.engine.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape
from app.engine.quantization.base import Axis, Dim
from app.errors import UnsupportedError
from app.kernels.gemm import Activations, LinearOps, PackedWeight, WeightT, linear_ops

BIAS = (Dim("output"),)


@dataclass(slots=True, frozen=True)
class Share:
    """This rank's part of one axis of a checkpoint's tensor, and its place in the parameter."""

    offset: int  # in the parameter
    size: int
    start: int  # in the checkpoint's tensor
    whole: int  # entries of the checkpoint's tensor

    def entries(self, per: int) -> Share:
        """The same where an entry stands for `per` of the axis; UnsupportedError where the rank's part ends in one."""
        if per > 1 and self.size < self.whole and (self.offset % per or self.size % per or self.start % per):
            raise UnsupportedError(
                f"a quantized weight's groups of {per} are cut by tensor_parallel_size; choose a smaller one",
                param="tensor_parallel_size",
            )
        return Share(self.offset // per, -(-self.size // per), self.start // per, -(-self.whole // per))


class Linear(Layer, ABC):
    """y = x W^T + b on this rank's share: weight [output_size, input_size], bias [output_size]."""

    weight: Weight  # where the quantization method stores a leaf of this name

    def __init__(
        self, ctx: BuildContext, input_size: int, output_size: int, bias: bool, parts: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.tp: RankGroup = ctx.groups.tp
        self.quantization = ctx.quantization
        self.leaves = ctx.quantization.leaves(ctx.dtype)
        sizes = {"output": output_size, "input": input_size, "unit": 1}
        for leaf in self.leaves:
            shape = [-(-sizes[dim.axis] // dim.per) for dim in leaf.dims]
            spec = WeightSpec(partial(self.load, leaf.dims), parts)
            self.register_parameter(leaf.name, Weight(torch.empty(shape, dtype=leaf.dtype), spec))
        self.bias = (
            Weight(torch.empty(output_size, dtype=ctx.dtype), WeightSpec(self.load_bias, parts)) if bias else None
        )
        self.packed: PackedWeight | None = None
        self.is_streamed = False  # its weight comes to where it lies just before it is read: it cannot be packed
        self.sums_up = False  # over ranks, each of which has a share of the input
        self.ops = linear_ops(ctx.device)

    @abstractmethod
    def share(self, axis: Axis, shard_id: str) -> Share:
        """This rank's share of the part `shard_id` of a fused layer ("" where there is one)."""

    def load(self, dims: Sequence[Dim], weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Have this rank's share of a stored tensor read. No more than that is read."""
        shares = [self.share(dim.axis, shard_id).entries(dim.per) for dim in dims]
        expect_shape(tensor, *(share.whole for share in shares))
        target, split = weight.data, 0
        for number, share in enumerate(shares):
            target = target.narrow(number, share.offset, share.size)
            split = number if share.size < share.whole else split
        tensor.read_into(target, split, shares[split].start)

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load a bias as `load` does a weight."""
        self.load(BIAS, weight, tensor, shard_id)

    def forward(self, x: Activations, epilogue: Epilogue[Any] = PLAIN) -> Any:
        """[T, input_size] -> [T, output_size], or what the epilogue makes of it."""
        if self.packed is None:
            return self._product(self.ops, x, self.weight, epilogue)
        return self._product(self.packed.ops, x, self.packed, epilogue)

    def _product(self, ops: LinearOps[WeightT], x: Activations, weight: WeightT, epilogue: Epilogue[Any]) -> Any:
        if self.sums_up:
            return epilogue.after(self.tp.all_reduce(ops.linear(x, weight, self.bias)))
        return epilogue.joined(ops, x, weight, self.bias)

    def pack(self) -> None:
        """Turn the loaded tensors into the weight that the quantization method multiplies. Their shapes stay, their
        memory is freed."""
        if self.is_streamed:
            return
        self.packed = self.quantization.pack({leaf.name: getattr(self, leaf.name).data for leaf in self.leaves})
        if self.packed is not None:
            for leaf in self.leaves:
                setattr(self, leaf.name, getattr(self, leaf.name).materialize(torch.device("meta")))


class MergedColumnLinear(Linear):
    """Several outputs of one input side by side (gate and up), each split over the ranks."""

    def __init__(self, ctx: BuildContext, input_size: int, output_sizes: dict[str, int], bias: bool) -> None:
        tp = ctx.groups.tp
        self.shares = {name: tp.share_of(size, name) for name, size in output_sizes.items()}
        parts = tuple(output_sizes) if len(output_sizes) > 1 else ()
        super().__init__(ctx, input_size, sum(self.shares.values()), bias, parts)
        self.input_size = input_size

    def shard(self, shard_id: str) -> tuple[int, int, int]:
        """(offset in the parameter, rows in it, number of the share in the checkpoint's tensor)."""
        names = list(self.shares)
        index = names.index(shard_id) if shard_id else 0
        return sum(self.shares[name] for name in names[:index]), self.shares[names[index]], self.tp.rank

    def whole(self, shard_id: str) -> int:
        """Rows of the checkpoint's tensor."""
        return self.shares[shard_id or next(iter(self.shares))] * self.tp.size

    def share(self, axis: Axis, shard_id: str) -> Share:
        """Outputs of this rank; all inputs."""
        if axis == "output":
            offset, rows, number = self.shard(shard_id)
            return Share(offset, rows, number * rows, self.whole(shard_id))
        size = self.input_size if axis == "input" else 1
        return Share(0, size, 0, size)


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
        """The same as for merged columns, but ranks that share a KV head read the same share."""
        offset, rows, share = super().shard(shard_id)
        return offset, rows, share if shard_id == "q_proj" else share // self.kv_copies

    def whole(self, shard_id: str) -> int:
        """Rows of the checkpoint's tensor."""
        return super().whole(shard_id) if shard_id == "q_proj" else self.whole_kv


class RowLinear(Linear):
    """The input is split over the ranks; the results are summed up, the same on every rank."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool) -> None:
        self.whole_input, self.output_size = input_size, output_size
        super().__init__(ctx, ctx.groups.tp.share_of(input_size, "input_size"), output_size, bias, ())
        self.sums_up = self.tp.size > 1

    def share(self, axis: Axis, shard_id: str) -> Share:
        """Inputs of this rank; all outputs."""
        if axis == "input":
            size = self.whole_input // self.tp.size
            return Share(0, size, self.tp.rank * size, self.whole_input)
        size = self.output_size if axis == "output" else 1
        return Share(0, size, 0, size)

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """The bias is added once: by rank 0."""
        if self.tp.rank == 0:
            super().load_bias(weight, tensor, shard_id)
        else:
            expect_shape(tensor, self.output_size)
            weight.data.zero_()
