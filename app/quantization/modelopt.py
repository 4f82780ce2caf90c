"""Checkpoints of NVIDIA's ModelOpt: fp8 with a scale for each tensor or block, MXFP8, and NVFP4.

Their configuration stands in config.json, in older ones in hf_quant_config.json (app/checkpoints/model_info.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from app.errors import UnsupportedError
from app.quantization.base import QuantMethod, StoredModule
from app.quantization.fp8_checkpoint import is_named
from app.quantization.fp8_conditions import check_fp8
from app.quantization.stored_fp4 import StoredFp4
from app.quantization.stored_fp8 import PER_OUTPUT, PER_TENSOR, StoredFp8
from app.quantization.stored_mxfp8 import StoredMxFp8

_INPUTS = ("input_scale", "pre_quant_scale")
_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL")
_FP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
_MXFP8 = "MXFP8"
_BLOCK = 128
_GROUP = 16


@dataclass(slots=True, frozen=True)
class ModelOpt(QuantMethod):
    """A whole checkpoint."""

    algorithm: str  # "MIXED_PRECISION": each layer has its own
    group: int
    excluded: tuple[str, ...]
    layers: tuple[tuple[str, str, int], ...] = ()  # name, algorithm, group

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fp8 has the same conditions as where it is made while loading."""
        if any(algorithm in _FP8 for algorithm in (self.algorithm, *(one for _, one, _ in self.layers))):
            check_fp8("an fp8 checkpoint", "take one that is not quantized", device, dtype)

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """UnsupportedError names a layer that was smoothed, which would need its inputs scaled."""
        if module.is_plain or module.kind == "embedding" or self._is_excluded(module.name):
            return None
        algorithm, group = self.algorithm, self.group
        if algorithm == "MIXED_PRECISION":
            found = next(((one, size) for name, one, size in self.layers if name == module.name), None)
            if found is None:
                return None
            algorithm, group = found
        if "pre_quant_scale" in (module.tensors or ()):
            raise UnsupportedError(f"ModelOpt: {module.name}.pre_quant_scale is not read", param="model")
        return _method(algorithm, group, module)

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) or is_named(pattern, name) for pattern in self.excluded)

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names an algorithm that is not read."""
        scheme = {**scheme, **(scheme.get("quantization") or {})}
        algorithm = str(scheme.get("quant_algo") or "").upper()
        layers = tuple(
            (name, str((one or {}).get("quant_algo", "")).upper(), _group_of(one or {}))
            for name, one in (scheme.get("quantized_layers") or {}).items()
        )
        for one in {algorithm, *(kind for _, kind, _ in layers)} - {"MIXED_PRECISION"}:
            if one not in (*_FP8, *_FP4, _MXFP8):
                known = ", ".join((*_FP8, *_FP4, _MXFP8, "MIXED_PRECISION"))
                raise UnsupportedError(f"ModelOpt: quant_algo {one!r} is not supported; known: {known}", param="model")
        excluded = scheme.get("exclude_modules") or scheme.get("ignore") or ()
        return cls(algorithm, _group_of(scheme), tuple(map(str, excluded)), layers)


def _group_of(scheme: Mapping[str, Any]) -> int:
    """Inputs that share a scale; UnsupportedError."""
    group = scheme.get("group_size")
    if group in (None, 0):
        return _GROUP
    if not isinstance(group, int) or group < 1:
        raise UnsupportedError(f"ModelOpt: group_size={group!r}", param="model")
    return group


def _method(algorithm: str, group: int, module: StoredModule) -> QuantMethod:
    if algorithm in _FP4:
        return StoredFp4(module.dtype, group, "weight_scale_2", codes="weight", unused=_INPUTS)
    if algorithm == _MXFP8:
        return StoredMxFp8(module.dtype, _INPUTS)
    if algorithm == "FP8":
        is_static = module.tensors is None or "input_scale" in module.tensors
        return StoredFp8(module.dtype, PER_TENSOR, input_scale="input_scale" if is_static else None)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return StoredFp8(module.dtype, PER_OUTPUT, unused=_INPUTS)
    return StoredFp8(module.dtype, (_BLOCK, _BLOCK), unused=_INPUTS, any_shape=True)
