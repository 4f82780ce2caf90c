"""Checkpoints of torchao in safetensors: tensor `a.weight` lies there as `a._weight_qdata`, `a._weight_scale` and, of
whole numbers, `a._weight_zero_point`.

What lies there tells what they are: e4m3, whole numbers of 8 bits (or fewer, a byte each), or two of 4 bits in a byte.
Only the configuration says whether activations are quantized; they are in fp8 always, in int8 where a row has one
scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.errors import CheckpointError, UnsupportedError
from app.kernels.gemm.fp8 import FP8
from app.quantization.base import QuantMethod, ReadableTensor, StoredModule, WeightShares
from app.quantization.forms import Fp8RowForm, GroupForm, Int8RowForm, WeightForm
from app.quantization.fp8_conditions import check_fp8

_DATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_NOT_READ = ("_weight_act_pre_scale", "_weight_scale_and_zero", "_weight_per_tensor_scale")
# Configurations by what their weights are: the others' lie in an order made for one kernel.
_OF_FP8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_OF_BOTH = "Int8DynamicActivationInt8WeightConfig"
_OF_INT8 = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig", _OF_BOTH)
_OF_INT4 = ("Int4WeightOnlyConfig",)


@dataclass(slots=True, frozen=True)
class Float8(QuantMethod):
    """e4m3 numbers with a scale for each row, or one for all."""

    dtype: torch.dtype
    has_row_scales: bool

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        scales = (Dim("output"), Dim("unit")) if self.has_row_scales else (Dim("part"),)
        return (
            Leaf(_DATA, FP8, (Dim("output"), Dim("input"))),
            Leaf(_SCALE, torch.float32, scales, any_shape=True, dummy=0.02),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        scale = stored[_SCALE] if self.has_row_scales else shares.rows_of_parts(stored[_SCALE])
        return Fp8RowForm(stored[_DATA], scale, self.dtype)


@dataclass(slots=True, frozen=True)
class Integers(QuantMethod):
    """int8 numbers, with scales and zeros for groups of a row."""

    dtype: torch.dtype
    group: int
    has_zeros: bool
    rounds_inputs: bool

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        groups = Dim("output"), Dim("input", self.group)
        leaves = (
            Leaf(_DATA, torch.int8, (Dim("output"), Dim("input"))),
            Leaf(_SCALE, torch.float32, groups, any_shape=True, dummy=3e-4),
        )
        return (*leaves, Leaf(_ZERO, torch.int8, groups, any_shape=True, dummy=0.0)) if self.has_zeros else leaves

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        scale, group = shares.spread(stored[_SCALE], 1, Dim("input", self.group))
        offset = None
        if self.has_zeros and bool(stored[_ZERO].any()):
            zeros, _ = shares.spread(stored[_ZERO], 1, Dim("input", self.group))
            offset = -(zeros.float() + 128) * scale
        if self.rounds_inputs and offset is None and scale.shape[1] == 1:
            return Int8RowForm(stored[_DATA], scale, self.dtype)
        return GroupForm(stored[_DATA].view(torch.uint8) ^ 128, scale, group, 8, self.dtype, offset)


@dataclass(slots=True, frozen=True)
class Nibbles(QuantMethod):
    """Two numbers from -8 to 7 in a byte, the first in its lower half; scales and centres of groups [K / g, N]."""

    dtype: torch.dtype
    group: int

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        groups = Dim("input", self.group), Dim("output")
        return (
            Leaf(_DATA, torch.int8, (Dim("output"), Dim("input", 2))),
            Leaf(_SCALE, torch.float32, groups, dummy=0.01),
            Leaf(_ZERO, torch.float32, groups, dummy=0.0),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        packed = stored[_DATA].view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1) ^ 8
        codes = shares.own(codes, 1, Dim("input", 2))
        scale, group = shares.spread(stored[_SCALE].t(), 1, Dim("input", self.group))
        centre, _ = shares.spread(stored[_ZERO].t(), 1, Dim("input", self.group))
        offset = centre - 8 * scale if bool(centre.any()) else None
        return GroupForm(codes, scale.contiguous(), group, 4, self.dtype, offset)


@dataclass(slots=True, frozen=True)
class TorchAo(QuantMethod):
    """A whole checkpoint. Which modules are quantized, their tensors say."""

    kinds: frozenset[str]  # names of configurations

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fp8 has the same conditions as where it is made while loading."""
        if self.kinds & set(_OF_FP8):
            check_fp8("an fp8 checkpoint", "take one that is not quantized", device, dtype)

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """CheckpointError and UnsupportedError name what is missing or not read."""
        if module.tensors is None:
            return self._expected(module)
        data, scale = module.tensors.get(_DATA), module.tensors.get(_SCALE)
        if module.is_plain or data is None:
            return None
        if odd := [name for name in _NOT_READ if name in module.tensors]:
            raise UnsupportedError(f"torchao: {module.name}.{odd[0]} is not read", param="model")
        if scale is None:
            raise CheckpointError(f"the checkpoint lacks {module.name}.{_SCALE}", param="model")
        if data.dtype == FP8:
            return _float8(module, scale)
        if data.dtype in (torch.int8, torch.uint8) and tuple(data.shape) == (module.num_outputs, module.num_inputs):
            has_zeros, rounds = _ZERO in module.tensors, _OF_BOTH in self.kinds
            return Integers(module.dtype, _group(module, scale, 0), has_zeros, rounds)
        if data.dtype == torch.int8 and tuple(data.shape) == (module.num_outputs, module.num_inputs // 2):
            return Nibbles(module.dtype, _group(module, scale, 1))
        kind = str(data.dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"torchao: {module.name}.{_DATA} is {kind} {list(data.shape)}: in an order made for one kernel",
            param="model",
        )

    def _expected(self, module: StoredModule) -> QuantMethod | None:
        """The method of random weights."""
        if module.kind != "linear":
            return None
        if self.kinds & set(_OF_FP8):
            return Float8(module.dtype, True)
        if self.kinds & set(_OF_INT8):
            return Integers(module.dtype, module.num_inputs, False, _OF_BOTH in self.kinds)
        return Nibbles(module.dtype, 32)

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names a configuration whose weights are not read."""
        kinds = frozenset(_kinds(scheme.get("quant_type")))
        for kind in kinds:
            if kind not in (*_OF_FP8, *_OF_INT8, *_OF_INT4):
                known = ", ".join((*_OF_FP8, *_OF_INT8, *_OF_INT4))
                raise UnsupportedError(f"torchao: {kind} is not supported; known: {known}", param="model")
        return cls(kinds)


def _kinds(config: Any) -> list[str]:
    """Names of configurations, which may be nested in others that tell them apart by names of modules."""
    if isinstance(config, str):  # before torchao 0.10
        raise UnsupportedError(f"torchao: quant_type {config!r} is of an older form, which is not read", param="model")
    if not isinstance(config, Mapping):
        return []
    kind = config.get("_type")
    if isinstance(kind, str) and not kind.endswith("FqnToConfig"):
        return [kind]
    inner = config.get("_data", config)
    values = inner.values() if isinstance(inner, Mapping) else ()
    return [one for value in values for one in _kinds(value if isinstance(value, Mapping) else None)]


def _float8(module: StoredModule, scale: ReadableTensor) -> Float8:
    count = torch.Size(scale.shape).numel()
    if count not in (1, module.num_outputs):
        raise UnsupportedError(
            f"torchao: {module.name}.{_SCALE} has shape {list(scale.shape)}, not a number for each of "
            f"{module.num_outputs} rows or one for all",
            param="model",
        )
    return Float8(module.dtype, count == module.num_outputs)


def _group(module: StoredModule, scale: ReadableTensor, dim: int) -> int:
    """Inputs that share a scale, of scales [N, K / g] (`dim` 0: where rows are) or [K / g, N]."""
    count = torch.Size(scale.shape).numel() // module.num_outputs
    if not count or module.num_inputs % count or scale.shape[dim] != module.num_outputs:
        raise CheckpointError(
            f"torchao: {module.name}.{_SCALE} has shape {list(scale.shape)}, which is none for groups of a weight "
            f"[{module.num_outputs}, {module.num_inputs}]",
            param="model",
        )
    return module.num_inputs // count
