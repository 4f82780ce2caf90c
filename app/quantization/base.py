"""Defines what a quantization method is: the tensors that a linear layer stores for its weight, and what is made of
them.

One object is a method for a whole checkpoint (`method_of` says which method serves which module, mostly itself) and for
the layers that it serves (`leaves`, then `unpack` or `pack`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf, Share
from app.errors import ConfigError, UnsupportedError
from app.kernels.gemm import PackedWeight
from app.quantization.forms import PackedForm, PlainForm, WeightForm

ModuleKind = Literal["linear", "head", "embedding"]
# How names of tensors begin that only a quantized weight has.
_QUANTIZED = ("weight_", "weight.", "_weight", "qweight")


class ReadableTensor(Protocol):
    """A tensor of a checkpoint that may be looked at before the model has memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        ...

    def whole(self) -> torch.Tensor:
        """All of it."""
        ...


@dataclass(slots=True, frozen=True)
class StoredModule:
    """One linear layer of a checkpoint, of which ours may fuse several."""

    name: str  # in the checkpoint
    kind: ModuleKind
    dtype: torch.dtype  # the type that the model computes in
    num_outputs: int  # N, as the checkpoint has it: of a fused module, the rows of all its parts
    num_inputs: int  # K
    has_bias: bool = False
    # What lies there under its name; None: there is no checkpoint to look at (load_format=dummy).
    tensors: Mapping[str, ReadableTensor] | None = None
    first_output: int = 0  # where the part of a fused module begins that a method is asked for

    @property
    def is_plain(self) -> bool:
        """True if it lies in the checkpoint as a plain weight, whatever lists of names say: every method of a
        checkpoint asks this first."""
        weight = (self.tensors or {}).get("weight")
        if weight is None or not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
            return False
        return not any(name.startswith(_QUANTIZED) for name in self.tensors or ())


@dataclass(slots=True, frozen=True)
class WeightShares:
    """Says what a rank holds of a weight [N, K]: outputs of parts side by side, and inputs."""

    outputs: tuple[Share, ...]
    inputs: Share

    @property
    def num_outputs(self) -> int:
        """Rows on this rank."""
        return sum(share.size for share in self.outputs)

    @property
    def num_inputs(self) -> int:
        """Columns on this rank."""
        return self.inputs.size

    def along(self, dim: Dim) -> Share:
        """The share of a dimension's axis, of all parts together."""
        if dim.axis == "input":
            return self.inputs
        if len(self.outputs) == 1:
            return self.outputs[0]
        return Share(0, self.num_outputs, 0, sum(share.whole for share in self.outputs))

    def own(self, values: torch.Tensor, number: int, dim: Dim) -> torch.Tensor:
        """This rank's of `values`, which stand for one output or input each along dimension `number`, once the entries
        that were read for `dim` are unpacked."""
        share = self.along(dim)
        return values.narrow(number, share.start if dim.whole else share.start % dim.per, share.size)

    def spread(self, scales: torch.Tensor, number: int, dim: Dim) -> tuple[torch.Tensor, int]:
        """Scales along dimension `number`, each for a group of outputs or inputs of which the first begins where this
        rank's share does, and the size of a group: smaller than `dim.per` where the share begins within one."""
        share = self.along(dim)
        first = share.start if dim.whole else share.start % dim.per
        size = math.gcd(dim.per, first)
        if size != dim.per:
            scales = scales.repeat_interleave(dim.per // size, number)
        return scales.narrow(number, first // size, -(-share.size // size)), size

    def rows_of_parts(self, scale: torch.Tensor) -> torch.Tensor:
        """A number for each part [P] as one for each row, [N, 1]."""
        sizes = torch.tensor([share.size for share in self.outputs], device=scale.device)
        return scale.repeat_interleave(sizes).unsqueeze(1)


class QuantMethod:
    """Says how linear layers keep their weights; those with equal methods may lie in one parameter."""

    unused: tuple[str, ...] = ()  # names beside the leaves that checkpoints hold and nobody needs

    def check(self, device: torch.device, dtype: torch.dtype) -> None:  # most run anywhere
        """Raise ConfigError, saying what to change, where this device or compute type cannot do it."""

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """The method of one module, None where its weights are plain: here this one of linear layers, none of the
        output head and the embedding. UnsupportedError or CheckpointError names what cannot be read."""
        return self if module.kind == "linear" else None

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """Returns what a layer of compute type `dtype` loads: here the weight [N, K] as a plain checkpoint has it."""
        return (Leaf("weight", dtype, (Dim("output"), Dim("input"))),)

    def stores_like(self, other: QuantMethod, dtype: torch.dtype) -> bool:
        """True if the other one's tensors could lie in the same parameters, each to be unpacked by its own method."""
        return self == other or (type(self) is type(other) and self.leaves(dtype) == other.leaves(dtype))

    @property
    def is_uniform(self) -> bool:
        """True if weights of one size always become tensors of the same sizes, which mean the same: so a further one
        may lie among a layer's experts."""
        return False

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """The leaves, once they are loaded, as numbers in rows and columns: those of this rank alone, none packed into
        others. Here what `pack` makes."""
        packed = self.pack(stored)
        return PlainForm(stored["weight"]) if packed is None else PackedForm(packed)

    def pack(self, stored: Mapping[str, torch.Tensor]) -> PackedWeight | None:
        """The leaves, once they are loaded, as what multiplies, for a method that has a kernel of its own. None: the
        layer multiplies with its leaf `weight` as it is."""
        raise NotImplementedError("a method has `unpack` or `pack`")

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """The method for a plain checkpoint (`quantization` in the configuration)."""
        raise ConfigError(
            "quantization: this method reads quantized checkpoints only, and these weights are plain: leave it out, or "
            "make such a checkpoint (manta quantize)",
            param="quantization",
        )

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """The method for a checkpoint with this `quantization_config`; UnsupportedError where it has none."""
        method = scheme.get("quant_method", "unknown")
        raise UnsupportedError(f"quantized checkpoints are not supported (quant_method {method!r})", param="model")
