"""The tensors in which a checkpoint stores one weight, as parameters of a layer: their shapes on this rank, how its
share of them is read, and what they are once they are loaded.

The same for linear layers, output heads, embeddings and stacked experts, whatever the quantization method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from app.checkpoints.tensors.leaf import Dim, Leaf, Share
from app.kernels.gemm import PackedWeight
from app.kernels.gemm.parts import PackedParts, UnpackedWeight
from app.kernels.gemm.tiled import fastest
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_dtype, expect_shape
from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import PlainForm, WeightForm

META = torch.device("meta")


class StoredWeight:
    """A weight [N, K], or one of each of `experts` [E, N, K]: its leaves as parameters of `layer`.

    `outputs` are this rank's shares of the parts that lie in it side by side (the key "": there is but one). Experts'
    tensors are asked for as "7.gate_proj", or "7" where there is one part; those of experts that are not among
    `experts`, whose methods store alike, are none of this rank's. Behind them lie `spare` ones, which the layer fills
    itself.
    """

    def __init__(
        self,
        layer: nn.Module,
        method: QuantMethod,
        outputs: Mapping[str, Share],
        inputs: Share,
        dtype: torch.dtype,
        *,
        experts: Mapping[int, QuantMethod] = MappingProxyType({}),
        spare: int = 0,
        prefix: str = "",
    ) -> None:
        self.method, self.outputs, self.inputs, self.dtype = method, dict(outputs), inputs, dtype
        self.experts = {expert: index for index, expert in enumerate(experts)}
        self.methods = list(experts.values())
        self.leaves = method.leaves(dtype)
        self.attributes = {leaf.name: prefix + leaf.name.replace(".", "__") for leaf in self.leaves}
        self._layer = layer
        for leaf in self.leaves:
            shape = [sum(self._place(dim, part).size for part in self._along(dim)) for dim in leaf.dims]
            spec = WeightSpec(partial(self._load, leaf), self._parts(), leaf.name, leaf.dummy)
            stack = [len(experts) + spare] if experts else []
            parameter = Weight(torch.empty(*stack, *shape, dtype=leaf.dtype), spec)
            layer.register_parameter(self.attributes[leaf.name], parameter)

    @staticmethod
    def fits(method: QuantMethod, outputs: Sequence[Share], dtype: torch.dtype) -> bool:
        """True if these parts' tensors can lie in one parameter: each has a place, and none begins within an entry."""
        leaves = method.leaves(dtype)
        pers = [leaf.output[1].per for leaf in leaves if leaf.output is not None]
        have_places = all(any(dim.axis in ("output", "part") for dim in leaf.dims) for leaf in leaves)
        return have_places and all(
            not share.offset % per and not share.start % per and (not share.size % per or share is outputs[-1])
            for per in pers
            for share in outputs
        )

    @property
    def is_plain(self) -> bool:
        """True if its only leaf is the weight, of the compute type: loaded, it may multiply as it is."""
        return [(leaf.name, leaf.dtype) for leaf in self.leaves] == [("weight", self.dtype)]

    @property
    def shares(self) -> WeightShares:
        """Returns what this rank holds."""
        return WeightShares(tuple(self.outputs.values()), self.inputs)

    def form(self) -> WeightForm:
        """Returns what was loaded, unpacked."""
        return self.method.unpack({leaf.name: self._parameter(leaf).data for leaf in self.leaves}, self.shares)

    def forms(self) -> list[WeightForm]:
        """The same of each expert."""
        stored = {leaf.name: self._parameter(leaf).data for leaf in self.leaves}
        each = [{name: x[index] for name, x in stored.items()} for index in range(len(self.experts))]
        return [method.unpack(one, self.shares) for method, one in zip(self.methods, each, strict=True)]

    def drop(self) -> None:
        """Free the parameters' memory; their shapes stay."""
        for leaf in self.leaves:
            setattr(self._layer, self.attributes[leaf.name], self._parameter(leaf).materialize(META))

    def remove(self) -> None:
        """Take the parameters away again, for another method's."""
        for attribute in self.attributes.values():
            delattr(self._layer, attribute)

    def _parameter(self, leaf: Leaf) -> Weight:
        parameter: Weight = getattr(self._layer, self.attributes[leaf.name])
        return parameter

    def _parts(self) -> tuple[str, ...]:
        parts = tuple(part for part in self.outputs if part)
        if not self.experts:
            return parts
        return tuple(f"{expert}.{part}" if part else str(expert) for expert in self.experts for part in parts or ("",))

    def _along(self, dim: Dim) -> Sequence[str]:
        """The parts whose entries lie side by side along a dimension."""
        return list(self.outputs) if dim.axis in ("output", "part") else [next(iter(self.outputs))]

    def _place(self, dim: Dim, part: str) -> Share:
        """The share of one part along a dimension of a leaf."""
        if dim.axis == "output":
            return dim.cover(self.outputs[part])
        if dim.axis == "input":
            return dim.cover(self.inputs)
        if dim.axis == "part":
            return Share(list(self.outputs).index(part), 1, 0, 1)
        return Share(0, dim.entries, 0, dim.entries)

    def _load(self, leaf: Leaf, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Have this rank's share of a stored tensor read. No more than that is read."""
        target, part = weight.data, shard_id
        if self.experts:
            number, _, part = shard_id.partition(".")
            target = target[self.experts[int(number)]]
        shares = [self._place(dim, part or next(iter(self.outputs))) for dim in leaf.dims]
        tensor = _shaped(tensor, leaf, [share.whole for share in shares])
        expect_dtype(tensor, leaf.dtype)
        split = 0
        for number_of_dim, share in enumerate(shares):
            target = target.narrow(number_of_dim, share.offset, share.size)
            split = number_of_dim if share.size < share.whole else split
        tensor.read_into(target, split, shares[split].start if shares else 0)


def _shaped(tensor: CheckpointTensor, leaf: Leaf, shape: list[int]) -> CheckpointTensor:
    """The tensor in the shape of the leaf, which a few numbers may have been stored without; ShapeMismatch."""
    is_free = leaf.any_shape or all(dim.axis in ("unit", "part") for dim in leaf.dims)
    if (
        is_free
        and tuple(tensor.shape) != tuple(shape)
        and torch.Size(tensor.shape).numel() == torch.Size(shape).numel()
    ):
        return tensor.reshaped(*shape)
    expect_shape(tensor, *shape)
    return tensor


def pack_stored(weights: Sequence[StoredWeight]) -> PackedWeight | None:
    """Packs what multiplies by weights side by side: in one product those that are alike. None: the plain tensor of the
    only one does, as it is."""
    forms: list[WeightForm] = []
    sizes: list[int] = []
    for weight in weights:
        form, rows = weight.form(), weight.shares.num_outputs
        joined = forms[-1].beside(form) if forms else None
        if joined is None:
            forms, sizes = [*forms, form], [*sizes, rows]
        else:
            forms[-1], sizes[-1] = joined, sizes[-1] + rows
    dtype = weights[0].dtype
    if len(weights) == 1 and weights[0].is_plain and isinstance(forms[0], PlainForm):
        return forms[0].pack()
    packed = tuple(
        UnpackedWeight(form.dequantize().to(dtype)) if (one := form.pack()) is None else fastest(one, dtype)
        for form in forms
    )
    return packed[0] if len(packed) == 1 else PackedParts(packed, tuple(sizes))
