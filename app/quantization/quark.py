"""Checkpoints of AMD's Quark: fp8, int8, whole numbers of 4 bits, and floats of few bits (MXFP4, MXFP8, NVFP4).

`quantization_config` holds a scheme for all layers, others by patterns of names, and which are left as they were.
Activations are quantized where a kernel does it as the scheme asks (fp8; int8 that is symmetric or has stored scales);
else they stay as they are, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.errors import UnsupportedError
from app.kernels.gemm.lookup import MX_GROUP
from app.quantization.awq import unpacked_words
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.bits import unpack_bits
from app.quantization.forms import GroupForm, WeightForm
from app.quantization.fp8_conditions import check_fp8
from app.quantization.name_patterns import PatternTime
from app.quantization.stored_fp4 import StoredFp4
from app.quantization.stored_fp8 import PER_OUTPUT, PER_TENSOR, StoredFp8
from app.quantization.stored_int8 import StoredInt8
from app.quantization.stored_mxfp8 import StoredMxFp8

_FP8 = "fp8_e4m3"
_INPUTS = ("input_scale", "input_zero_point")
_UNUSED = ("weight_zero_point", "output_scale", "output_zero_point")  # zeros of symmetric weights; of the KV cache
_WORD = Dim("output", 8)
_PACKINGS = ("reorder", "order")  # of eight numbers in a word: AWQ's, or one after the other


@dataclass(slots=True, frozen=True)
class StoredQuarkInt4(QuantMethod):
    """One weight: words [K, N / 8] of eight outputs each, scales [K / group, N]; symmetric numbers are signed."""

    dtype: torch.dtype  # the type that the model computes in
    group: int  # inputs that share a scale
    symmetric: bool
    packing: str
    unused: tuple[str, ...] = ()

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        groups = Dim("input", self.group)
        words = Leaf("weight", torch.int32, (Dim("input"), _WORD))
        scale = Leaf("weight_scale", torch.float32, (groups, Dim("output")), dummy=0.005)
        if self.symmetric:
            return words, scale
        return words, scale, Leaf("weight_zero_point", torch.int32, (groups, _WORD))

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        groups = Dim("input", self.group)
        scale, group = shares.spread(stored["weight_scale"], 0, groups)
        codes, offset = self._numbers(stored["weight"], shares), None
        if self.symmetric:
            codes = codes ^ 8
        else:
            zeros = self._numbers(stored["weight_zero_point"], shares)
            offset = -shares.spread(zeros.float(), 0, groups)[0] * scale
            offset = offset.t().contiguous()
        return GroupForm(codes.t().contiguous(), scale.t().contiguous(), group, 4, self.dtype, offset)

    def _numbers(self, words: torch.Tensor, shares: WeightShares) -> torch.Tensor:
        """int32 [M, N / 8] -> uint8 [M, N] of this rank's outputs."""
        codes = unpacked_words(words) if self.packing == "reorder" else unpack_bits(words, 4)
        return shares.own(codes, 1, _WORD)


@dataclass(slots=True, frozen=True)
class Scheme:
    """Says how the layers that `name` stands for are quantized: Quark's tables, one or two levels of each."""

    name: str
    weight: tuple[Mapping[str, Any], ...]
    inputs: tuple[Mapping[str, Any], ...]
    packing: str

    def refuse(self, what: str) -> UnsupportedError:
        """The error that says so."""
        return UnsupportedError(f"quark: {self.name}: {what}", param="model")

    def method(self, dtype: torch.dtype) -> QuantMethod | None:
        """The method of its layers, None where weights are plain; UnsupportedError names what nobody here reads."""
        if not self.weight:
            return None
        kinds = [str(level.get("dtype")) for level in self.weight]
        first = self.weight[0]
        if any(level.get("is_dynamic") for level in self.weight):
            raise self.refuse("weight with is_dynamic=true")
        if kinds == ["fp4", _FP8] and self._group() == 16:
            return StoredFp4(dtype, 16, "weight_scale_2", codes="weight", unused=(*_UNUSED, *_INPUTS, "input_scale_2"))
        if kinds == ["fp4"] and self._group() == 32 and first.get("scale_format") == "e8m0":
            return StoredFp4(dtype, 32, codes="weight", unused=(*_UNUSED, *_INPUTS))
        if kinds == [_FP8] and first.get("scale_format") == "e8m0" and self._group() == MX_GROUP:
            return StoredMxFp8(dtype, (*_UNUSED, *_INPUTS))
        if kinds == [_FP8]:
            return self._fp8(dtype)
        if kinds == ["int8"] and first.get("symmetric"):
            return self._int8(dtype)
        if kinds in (["int4"], ["uint4"]):
            return self._int4(dtype, bool(first.get("symmetric")))
        scheme = ", ".join(f"{key}={first.get(key)!r}" for key in ("qscheme", "group_size", "symmetric"))
        raise self.refuse(f"weight of dtype={'+'.join(kinds)}, {scheme} is not read")

    def _group(self) -> int:
        size = self.weight[0].get("group_size")
        if self.weight[0].get("qscheme") != "per_group" or not isinstance(size, int) or size < 1:
            found = f"qscheme={self.weight[0].get('qscheme')!r}, group_size={size!r}"
            raise self.refuse(f"weight of dtype={self.weight[0].get('dtype')} with {found}")
        return size

    def _is_whole(self) -> bool:
        """True if a tensor has one scale, not one for each output."""
        scheme, axis = self.weight[0].get("qscheme"), self.weight[0].get("ch_axis")
        if scheme not in ("per_tensor", "per_channel") or (scheme == "per_channel" and axis not in (None, 0)):
            raise self.refuse(f"weight with qscheme={scheme!r}, ch_axis={axis!r}")
        return bool(scheme == "per_tensor")

    def _static(self, dtype: str) -> bool:
        """True if activations of `dtype` have a scale that is stored."""
        inputs = self.inputs[0] if len(self.inputs) == 1 else {}
        if inputs.get("dtype") != dtype:
            raise self.refuse(f"weight of {dtype}, input_tensors of {inputs.get('dtype')}")
        if inputs.get("is_dynamic"):
            return False
        if inputs.get("qscheme") != "per_tensor":
            raise self.refuse(f"static input_tensors with qscheme={inputs.get('qscheme')!r}")
        return True

    def _int4(self, dtype: torch.dtype, symmetric: bool) -> StoredQuarkInt4:
        unused = ("output_scale", "output_zero_point", *_INPUTS, *(("weight_zero_point",) if symmetric else ()))
        return StoredQuarkInt4(dtype, self._group(), symmetric, self.packing, unused)

    def _fp8(self, dtype: torch.dtype) -> StoredFp8:
        static = self._static(_FP8)
        unused = _UNUSED if static else (*_UNUSED, *_INPUTS)
        block = PER_TENSOR if self._is_whole() else PER_OUTPUT
        return StoredFp8(dtype, block, input_scale="input_scale" if static else None, unused=unused)

    def _int8(self, dtype: torch.dtype) -> StoredInt8:
        static, group = self._static("int8"), -1 if self._is_whole() else 0
        symmetric = bool(self.inputs[0].get("symmetric"))
        if not static:
            return StoredInt8(dtype, group, rounds_inputs=symmetric, unused=(*_UNUSED, *_INPUTS))
        unused = (*_UNUSED, "input_zero_point") if symmetric else _UNUSED
        return StoredInt8(dtype, group, True, static_inputs=True, input_zeros=not symmetric, unused=unused)


@dataclass(slots=True, frozen=True)
class Quark(QuantMethod):
    """A whole checkpoint."""

    everywhere: Scheme
    layers: tuple[Scheme, ...]  # by patterns of names; the first that fits
    excluded: tuple[str, ...]
    patterns: PatternTime = field(default_factory=PatternTime, compare=False, repr=False)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fp8 has the same conditions as where it is made while loading."""
        if any(isinstance(scheme.method(dtype), StoredFp8) for scheme in (self.everywhere, *self.layers)):
            check_fp8("an fp8 checkpoint", "take one that is not quantized", device, dtype)

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """That of the first pattern which fits the module's name, or else the one of all layers."""

        def fits(pattern: str) -> bool:
            return _fits(pattern, module.name, self.patterns)

        if module.is_plain or module.kind == "embedding" or any(map(fits, self.excluded)):
            return None
        found = next((scheme for scheme in self.layers if fits(scheme.name)), self.everywhere)
        return found.method(module.dtype)

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names what this checkpoint has otherwise."""
        export = scheme.get("export") or {}
        packing = export.get("pack_method") or "reorder"
        if packing not in _PACKINGS:
            raise UnsupportedError(f"quark: export.pack_method={packing!r:.80}; known: reorder, order", param="model")
        if export.get("weight_format") not in (None, "real_quantized"):
            found = f"export.weight_format={export['weight_format']!r:.80}"
            raise UnsupportedError(f"quark: {found}; take a checkpoint with real_quantized weights", param="model")
        if scheme.get("layer_type_quant_config"):
            raise UnsupportedError("quark: layer_type_quant_config is not read", param="model")
        patterns = PatternTime()
        cache = tuple(export.get("kv_cache_group") or ())
        layers = tuple(
            _scheme(name, table, packing, any(_fits(pattern, name, patterns) or pattern == name for pattern in cache))
            for name, table in (scheme.get("layer_quant_config") or {}).items()
        )
        whole = _scheme("global_quant_config", scheme.get("global_quant_config") or {}, packing, False)
        for one in (whole, *layers):
            one.method(torch.float32)
        return cls(whole, layers, tuple(scheme.get("exclude") or ()), patterns)


def _scheme(name: str, table: Mapping[str, Any], packing: str, cached: bool) -> Scheme:
    """`cached`: what comes out goes to the KV cache, whose scales are no matter of the weights."""
    read = Scheme(name, _levels(table.get("weight")), _levels(table.get("input_tensors")), packing)
    if table.get("bias"):
        raise read.refuse("a quantized bias")
    if table.get("output_tensors") and not cached:
        raise read.refuse("output_tensors")
    return read


def _levels(tables: Any) -> tuple[Mapping[str, Any], ...]:
    return () if not tables else (tables,) if isinstance(tables, Mapping) else tuple(tables)


def _fits(pattern: str, name: str, patterns: PatternTime) -> bool:
    """A name, a pattern of a shell, or after `re:` one of Python's at the beginning of the name."""
    if pattern.startswith("re:"):
        return patterns.begins(pattern[3:], name)
    return pattern == name or fnmatchcase(name, pattern)
