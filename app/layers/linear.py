"""Linear layers over a tensor-parallel group.

Column layers split the output over the ranks, row layers the input and sum up the ranks' results (Megatron-LM: Shoeybi
et al., 2019). Fused layers (query-key-value, gate-up) hold several checkpoint tensors in one parameter, as far as they
are stored alike. Which tensors are stored, the parts' quantization methods say; how they are split follows from their
dimensions. `Linear.forward` is the one place where a weight meets an activation, and the one exit: what follows the
product comes as its epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch

from app.checkpoints.tensors.leaf import Share
from app.kernels.gemm import LINEAR_OPS, Inputs, LinearOps, PackedWeight, QuantizedNorm, WeightT, materialize
from app.kernels.gemm.parts import PackedParts, UnpackedWeight
from app.layers.adapted_layer import AdaptedLayer
from app.layers.context import BuildContext
from app.layers.epilogue import PLAIN, Epilogue
from app.layers.leaves import LeafRows
from app.layers.packing import Packing
from app.layers.quantized_layer import LayerPart
from app.layers.side_by_side import SideBySide
from app.layers.stored_weight import StoredWeight, pack_stored
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape
from app.quantization.base import QuantMethod
from app.quantization.plain import PLAIN_METHOD


class Linear(AdaptedLayer):
    """y = x W^T + b on this rank's share: weight [output_size, input_size], bias [output_size]."""

    weight: Weight  # where a quantization method stores a leaf of this name

    def __init__(self, ctx: BuildContext, outputs: Mapping[str, Share], inputs: Share, bias: bool) -> None:
        """`outputs`: this rank's shares of the parts, by their names in the checkpoint ("": its own)."""
        super().__init__()
        self.tp = ctx.groups.tp
        self.dtype = ctx.dtype
        self.output_shares, self.input_share = dict(outputs), inputs
        self.stored: list[StoredWeight] = []
        self.store(dict.fromkeys(outputs, PLAIN_METHOD))
        parts = tuple(part for part in outputs if part)
        size = sum(share.size for share in outputs.values())
        self.bias = Weight(torch.empty(size, dtype=ctx.dtype), WeightSpec(self.load_bias, parts)) if bias else None
        self.packed: PackedWeight | None = None
        self.products: tuple[Callable[[Inputs], torch.Tensor], ...] = ()  # of weights that are stored unlike
        self.packed_ops: LinearOps[Any] | None = None  # None: what follows its product is a launch of its own
        self.is_streamed = False  # where it is, it cannot be packed, and steps write it
        self.sums_up = False  # over ranks, each of which has a share of the input
        self.device, self.ops = ctx.device, ctx.kernels(LINEAR_OPS)
        self.packing = Packing.of(ctx, self.ops)

    @property
    def quantized_parts(self) -> Mapping[str, LayerPart]:
        """See QuantizedLayer."""
        return {
            part: LayerPart(share.whole, self.input_share.whole, self.bias is not None)
            for part, share in self.output_shares.items()
        }

    def store(self, methods: Mapping[str, QuantMethod]) -> None:
        """Parts that stand side by side and have equal methods lie in one parameter, if their entries allow it."""
        for weight in self.stored:
            weight.remove()
        runs = [(method, list(parts)) for method, parts in groupby(self.output_shares, lambda part: methods[part])]
        runs = [run for method, parts in runs for run in self._fitting(method, parts)]
        self.stored = []
        for method, parts in runs:
            offset, outputs = 0, {}
            for part in parts:
                share = self.output_shares[part]
                outputs[part] = Share(offset, share.size, share.start, share.whole)
                offset += share.size
            prefix = "" if len(runs) == 1 else "_".join(parts) + "_"
            self.stored.append(StoredWeight(self, method, outputs, self.input_share, self.dtype, prefix=prefix))

    def _fitting(self, method: QuantMethod, parts: list[str]) -> list[tuple[QuantMethod, list[str]]]:
        first = self.output_shares[parts[0]].offset
        shares = [self.output_shares[part] for part in parts]
        moved = [Share(share.offset - first, share.size, share.start, share.whole) for share in shares]
        if len(parts) == 1 or StoredWeight.fits(method, moved, self.dtype):
            return [(method, parts)]
        return [(method, [part]) for part in parts]

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Have this rank's share of a bias read."""
        share = self.output_shares[shard_id]
        expect_shape(tensor, share.whole)
        tensor.read_into(weight.data.narrow(0, share.offset, share.size), 0, share.start)

    def forward(self, x: Inputs, epilogue: Epilogue[Any] = PLAIN) -> Any:
        """[T, input_size] -> [T, output_size], or what the epilogue makes of it."""
        x = epilogue.read(x)
        if self.packed is not None and self.packed_ops is None:
            return self._after_packed(x, self.packed, epilogue)
        if self.packed is not None and self.packed_ops is not None:
            return self._product(self.packed_ops, x, self.packed, epilogue)
        return self._product(self.ops, x, self.weight, epilogue)

    def apart(self, x: Inputs) -> SideBySide:
        """[T, output_size], in as many products as there are weights that are stored unlike, each by its own kernel."""
        is_whole = not isinstance(self.packed, PackedParts) or self.bias is not None or self.sums_up
        if is_whole or (self.delta is not None and self.delta.is_wanted):
            return SideBySide((self(x),))
        others = [product(x) for product in self.products[1:]]  # small ones, beside which the first may run
        return SideBySide((self.products[0](x), *others))

    def _product_of(self, weight: PackedWeight, *, is_first: bool) -> Callable[[Inputs], torch.Tensor]:
        ops = weight.ops_on(self.device)
        if isinstance(weight, UnpackedWeight):
            return lambda x: self.ops.linear(x, weight.weight, None)
        if ops is None:
            return lambda x: weight.linear(materialize(x), None)
        linear = ops.linear_beside if is_first and ops.linear_beside is not None else ops.linear
        return lambda x: linear(x, weight, None)

    def _product(self, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, epilogue: Epilogue[Any]) -> Any:
        """Each rank adds the delta of its share, before they are summed up."""
        if self.delta is not None or self.is_streamed:
            ops = ops.beside_adapters or ops
        if self.delta is not None and self.delta.is_wanted:
            x = x.materialize() if isinstance(x, QuantizedNorm) else x
            return self._joined(self.delta.ops, x, self.delta.over(ops, weight), epilogue)
        return self._joined(ops, x, weight, epilogue)

    def _joined(self, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, epilogue: Epilogue[Any]) -> Any:
        if self.sums_up:
            return epilogue.summed(self.tp, ops, x, weight, self.bias)
        return epilogue.joined(ops, x, weight, self.bias)

    def _after_packed(self, x: Inputs, weight: PackedWeight, epilogue: Epilogue[Any]) -> Any:
        y = weight.linear(materialize(x), self.bias)
        if self.delta is not None and self.delta.is_wanted:
            y = self.delta.add(x, y)
        return epilogue.after_all_reduce(self.tp, y) if self.sums_up else epilogue.after(y)

    @property
    def adds_bias(self) -> bool:
        """See AdaptedLayer."""
        return not self.sums_up or self.tp.rank == 0

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See AdaptedLayer."""
        if self.packed is None:
            return self.ops.linear(x, self.weight, None)
        return self.packed.linear(x, None) if self.packed_ops is None else self.packed_ops.linear(x, self.packed, None)

    def squares(self) -> torch.Tensor:
        """See AdaptedLayer."""
        return super().squares() if self.packed is not None else self.weight.float().square().sum(1)

    def pack(self) -> None:
        """Turn the loaded tensors into the weight that multiplies. Their shapes stay, their memory is freed."""
        if self.is_streamed:
            return
        outputs = sum(share.size for share in self.output_shares.values())
        whole = partial(pack_stored, self.stored)
        self.packed = self.packing.packed(whole, self.in_leaves, outputs, self.input_share.size)
        if self.packed is not None:
            self.packed_ops = self.packed.ops_on(self.device)
            parts = self.packed.parts if isinstance(self.packed, PackedParts) else ()
            self.products = tuple(self._product_of(part, is_first=part is parts[0]) for part in parts)
            for weight in self.stored:
                weight.drop()

    def in_leaves(self) -> PackedWeight | None:
        """The weight in pieces that no number of ranks changes; None where the product does not look at its shape."""
        return self.packing.columns(self.weight, self.output_shares.values())

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self.packed

    def drop_packed(self) -> None:
        """See QuantizedLayer."""
        self.packed, self.products = None, ()


class MergedColumnLinear(Linear):
    """Several outputs of one input side by side (gate and up), each split over the ranks."""

    def __init__(
        self,
        ctx: BuildContext,
        input_size: int,
        output_sizes: Mapping[str, int],
        bias: bool,
        copies: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`copies`: how many ranks in a row hold the same share of a part, where that is more than one."""
        tp, offset, outputs = ctx.groups.tp, 0, {}
        held = {}
        for name, size in output_sizes.items():
            shared = copies.get(name, 1)
            rows = tp.share_of(size * shared, name)
            outputs[name if len(output_sizes) > 1 else ""] = Share(offset, rows, tp.rank // shared * rows, size)
            held[name] = rows
            offset += rows
        super().__init__(ctx, outputs, Share(0, input_size, 0, input_size), bias)
        self.shares = held  # rows of this rank


class ColumnLinear(MergedColumnLinear):
    """One output, split over the ranks."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool) -> None:
        super().__init__(ctx, input_size, {"output": output_size}, bias)


class QKVLinear(MergedColumnLinear):
    """Query, key and value projections in one. Where there are more ranks than KV heads, ranks share a head."""

    def __init__(
        self,
        ctx: BuildContext,
        input_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        has_gate: bool = False,
    ) -> None:
        """`has_gate`: behind the values, as many numbers as queries have."""
        tp = ctx.groups.tp
        copies = max(1, tp.size // num_kv_heads)  # ranks that hold the same KV head
        query_heads = tp.share_of(num_heads, "num_attention_heads")
        kv_heads = tp.share_of(num_kv_heads * copies, "num_key_value_heads")
        sizes = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        sizes |= {"gate_proj": num_heads * head_dim} if has_gate else {}
        super().__init__(ctx, input_size, sizes, bias, {"k_proj": copies, "v_proj": copies})
        self.num_heads, self.num_kv_heads = query_heads, kv_heads
        self.first_kv_head = self.output_shares["k_proj"].start // head_dim  # in the whole layer


class RowLinear(Linear):
    """The input is split over the ranks; the results are summed up, the same on every rank."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool) -> None:
        tp = ctx.groups.tp
        share = tp.share_of(input_size, "input_size")
        inputs = Share(0, share, tp.rank * share, input_size)
        super().__init__(ctx, {"": Share(0, output_size, 0, output_size)}, inputs, bias)
        self.output_size = output_size
        self.sums_up = self.tp.size > 1 and not ctx.has_leaves  # leaves are summed by their weight

    def in_leaves(self) -> PackedWeight:
        """See Linear."""
        return LeafRows.of(self.weight, self.tp)

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """The bias is added once: by rank 0."""
        if self.tp.rank == 0:
            super().load_bias(weight, tensor, shard_id)
        else:
            expect_shape(tensor, self.output_size)
            weight.data.zero_()
