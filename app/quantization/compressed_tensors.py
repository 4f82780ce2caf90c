"""Checkpoints in the form of `compressed-tensors`, which llm-compressor writes: groups of modules, each with a scheme
of its own for weights and activations.

Weights are always what the checkpoint stands for. Activations are quantized where a kernel does it as the scheme asks
(fp8; int8, symmetric as it arrives or with stored scales); else they stay as they are, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from app.errors import UnsupportedError
from app.kernels.gemm.lookup import MX_GROUP
from app.quantization.base import QuantMethod, StoredModule
from app.quantization.fp8_conditions import check_fp8
from app.quantization.name_patterns import PatternTime
from app.quantization.packed_integers import PackedIntegers
from app.quantization.stored_fp4 import StoredFp4
from app.quantization.stored_fp8 import PER_OUTPUT, PER_TENSOR, StoredFp8
from app.quantization.stored_int8 import StoredInt8
from app.quantization.stored_mxfp8 import StoredMxFp8

_CLASSES = {"linear": "Linear", "head": "Linear", "embedding": "Embedding"}
_SPARSE = ("marlin-24", "sparse-bitmask", "sparse-24-bitmask")
_FORMATS = (
    *("", "None", "dense", "mixed-precision", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_BLOCKS = ("tensor", "channel", "block")


@dataclass(slots=True, frozen=True)
class Group:
    """Modules that are quantized alike."""

    name: str
    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]
    format: str  # "": by what is in it

    def refuse(self, what: str) -> UnsupportedError:
        """The error that says so."""
        return UnsupportedError(f"compressed-tensors: {self.name}: {what}", param="model")

    def method(self, dtype: torch.dtype) -> QuantMethod:
        """The method of its modules; UnsupportedError names what nobody here reads."""
        kind, bits = self.weights.get("type") or "int", self.weights.get("num_bits")
        bits = 8 if bits is None else bits
        if self.weights.get("dynamic"):
            raise self.refuse("weights with dynamic=True")
        if kind == "int" and 1 <= bits <= 8:
            packed = self.format == "pack-quantized" or (not self.format and bits < 8)
            return self._packed(dtype, bits) if packed else self._int8(dtype, bits)
        if kind == "float" and self.weights.get("symmetric", True):
            if bits == 8:
                return self._mxfp8(dtype) if self.format == "mxfp8-quantized" else self._fp8(dtype)
            if bits == 4:
                return self._fp4(dtype)
        raise self.refuse(f"weights of type={kind!r}, num_bits={bits}, symmetric={self.weights.get('symmetric', True)}")

    def _packed(self, dtype: torch.dtype, bits: int) -> PackedIntegers:
        order = self.weights.get("actorder")
        if order not in (None, False, True, "weight", "static", "group", "dynamic"):
            raise self.refuse(f"weights with actorder={order!r}")
        group = self._group_size("tensor", "channel", "group")
        has_zeros = not self.weights.get("symmetric", True)
        if has_zeros and group < 0:
            raise self.refuse("zeros of a whole tensor")
        ordered = order in (True, "group", "dynamic") and group > 0
        unused = ("weight_shape", "input_global_scale", *_INPUTS, *(() if ordered else ("weight_g_idx",)))
        return PackedIntegers(dtype, bits, group, has_zeros, ordered, unused)

    def _int8(self, dtype: torch.dtype, bits: int) -> StoredInt8:
        if not self.weights.get("symmetric", True):
            raise self.refuse(f"weights with num_bits={bits}, symmetric=False, a byte each")
        group, inputs = self._group_size("tensor", "channel", "group"), self.inputs
        rounds = inputs.get("type", "int") == "int" and inputs.get("num_bits") == 8 and group <= 0
        if not inputs or not rounds:
            return StoredInt8(dtype, group, rounds_inputs=False, unused=_INPUTS)
        symmetric, static = inputs.get("symmetric", True), not inputs.get("dynamic", False)
        if static and inputs.get("strategy", "tensor") != "tensor":
            raise self.refuse(f"static input_activations with strategy={inputs['strategy']!r}")
        if not static:
            return StoredInt8(dtype, group, rounds_inputs=bool(symmetric), unused=_INPUTS)
        zeros = not symmetric
        unused = () if zeros else ("input_zero_point",)
        return StoredInt8(dtype, group, rounds_inputs=True, static_inputs=True, input_zeros=zeros, unused=unused)

    def _mxfp8(self, dtype: torch.dtype) -> StoredMxFp8:
        if self._group_size("group") != MX_GROUP:
            raise self.refuse(f"MXFP8 with group_size={self.weights.get('group_size')!r}")
        return StoredMxFp8(dtype, _INPUTS)

    def _fp8(self, dtype: torch.dtype) -> StoredFp8:
        strategy = self.weights.get("strategy") or "tensor"
        if strategy not in _BLOCKS:
            raise self.refuse(f"fp8 weights with strategy={strategy!r}")
        static = bool(self.inputs) and not self.inputs.get("dynamic", False) and strategy != "block"
        if static and self.inputs.get("strategy", "tensor") != "tensor":
            raise self.refuse(f"static input_activations with strategy={self.inputs['strategy']!r}")
        block = PER_TENSOR if strategy == "tensor" else PER_OUTPUT
        if strategy == "block":
            block = self._block()
        scale, unused = ("input_scale", ()) if static else (None, _INPUTS)
        return StoredFp8(dtype, block, input_scale=scale, unused=unused, rounds_inputs=bool(self.inputs))

    def _block(self) -> tuple[int, int]:
        size = self.weights.get("block_structure")
        if isinstance(size, str):
            size = [int(number) for number in size.split("x")]
        if not isinstance(size, list) or len(size) != 2 or min(size) < 1:
            raise self.refuse(f"weights with block_structure={size!r}")
        return size[0], size[1]

    def _fp4(self, dtype: torch.dtype) -> StoredFp4:
        group, strategy = self.weights.get("group_size"), self.weights.get("strategy")
        if strategy == "tensor_group" and group == 16:
            return StoredFp4(dtype, 16, "weight_global_scale", divides=True, unused=("input_global_scale", *_INPUTS))
        if strategy == "group" and group == 32:
            return StoredFp4(dtype, 32, unused=_INPUTS)
        raise self.refuse(f"4-bit floats with strategy={strategy!r}, group_size={group!r}")

    def _group_size(self, *known: str) -> int:
        strategy, size = self.weights.get("strategy"), self.weights.get("group_size")
        if strategy is None:
            strategy = "tensor" if size is None else "group" if size > 0 else "channel"
        if strategy not in known:
            raise self.refuse(f"weights with strategy={strategy!r}")
        if strategy == "group" and (not isinstance(size, int) or size < 1):
            raise self.refuse(f"weights with group_size={size!r}")
        return {"tensor": -1, "channel": 0}.get(strategy) if strategy != "group" else size  # type: ignore[return-value]


_INPUTS = ("input_scale", "input_zero_point")


@dataclass(slots=True, frozen=True)
class CompressedTensors(QuantMethod):
    """A whole checkpoint."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    patterns: PatternTime = field(default_factory=PatternTime, compare=False, repr=False)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fp8 has the same conditions as where it is made while loading."""
        if any(isinstance(group.method(dtype), StoredFp8) for group in self.groups):
            check_fp8("an fp8 checkpoint", "take one that is not quantized", device, dtype)

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """That of the group whose targets name the module, or else its class."""
        kind = _CLASSES[module.kind]
        if module.is_plain or self._matches(self.ignored, module.name, kind):
            return None
        named = (group for group in self.groups if self._matches(set(group.targets) - {kind}, module.name, kind))
        of_class = (group for group in self.groups if kind in group.targets)
        group = next(chain(named, of_class), None)
        if group is None:
            return None
        method = group.method(module.dtype)
        return method.of_module(module) if isinstance(method, PackedIntegers) else method

    def _matches(self, patterns: Iterable[str], name: str, kind: str) -> bool:
        """True if one is the module's name, its class or, after `re:`, a pattern at the beginning of its name."""
        return any(
            self.patterns.begins(pattern[3:], name) if pattern.startswith("re:") else pattern in (name, kind)
            for pattern in patterns
        )

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names what this checkpoint has otherwise."""
        sparsity = (scheme.get("sparsity_config") or {}).get("format", "dense")
        for name in (sparsity, str(scheme.get("format"))):
            if name in _SPARSE:
                raise UnsupportedError(f"compressed-tensors: sparse weights ({name})", param="model")
        if (scheme.get("transform_config") or {}).get("config_groups"):
            raise UnsupportedError("compressed-tensors: weights behind a transform", param="model")
        whole = str(scheme.get("format") or "")
        groups = tuple(_group(name, group, whole) for name, group in (scheme.get("config_groups") or {}).items())
        for group in groups:
            group.method(torch.float32)
        return cls(groups, tuple(scheme.get("ignore") or ()))


def _group(name: str, group: Mapping[str, Any], whole: str) -> Group:
    form = str(group.get("format") or whole)
    if form in _SPARSE:
        raise UnsupportedError(f"compressed-tensors: {name}: sparse weights ({form})", param="model")
    if form not in _FORMATS:
        raise UnsupportedError(f"compressed-tensors: {name}: format={form!r:.80} is not read", param="model")
    form = "" if form in ("mixed-precision", "dense", "None") else form
    read = Group(
        name,
        tuple(group.get("targets") or ("Linear",)),
        group.get("weights") or {},
        group.get("input_activations") or {},
        form,
    )
    if not read.weights:
        raise read.refuse("activations are quantized, and no weights")
    if group.get("output_activations"):
        raise read.refuse("output_activations")
    return read
