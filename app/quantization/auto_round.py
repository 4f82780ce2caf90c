"""Checkpoints of AutoRound (Cheng et al., 2023), which packs as GPTQ, AWQ, fp8 or compressed-tensors' floats of 4 bits
do: `packing_format` says which.

Modules have options of their own in `extra_config`, by name or by a pattern; those of 16 bits, and those
that lie there as plain weights, are plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.errors import UnsupportedError
from app.quantization.awq import StoredAwq
from app.quantization.base import QuantMethod, StoredModule
from app.quantization.gptq import StoredGptq
from app.quantization.name_patterns import PatternTime
from app.quantization.stored_fp4 import StoredFp4
from app.quantization.stored_fp8 import PER_OUTPUT, PER_TENSOR, StoredFp8
from app.quantization.stored_mxfp8 import StoredMxFp8

_GPTQ = ("auto_gptq",)  # zeros less 1
_OWN = ("auto_round", "gptqmodel")  # zeros as they are
_ALIASES = {"gptq": "auto_gptq", "awq": "auto_awq"}
_FP8 = ("fp8", "fp8_static")
_MX = "llm_compressor"
_PLAIN_BITS = 16
_OPTIONS = ("bits", "group_size", "data_type")


@dataclass(slots=True, frozen=True)
class AutoRound(QuantMethod):
    """A whole checkpoint."""

    packing: str
    options: tuple[tuple[str, Any], ...]
    extra: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]  # by names and patterns
    by_name: Mapping[str, tuple[tuple[str, Any], ...]] = field(default_factory=dict, compare=False, repr=False)
    patterns: PatternTime = field(default_factory=PatternTime, compare=False, repr=False)

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """Returns None for what lies there as a plain weight; the rest is as the module's options say."""
        options = self._options(module.name)
        if module.is_plain or module.kind == "embedding" or options.get("bits", 4) >= _PLAIN_BITS:
            return None
        if module.tensors is None and module.kind == "head":
            return None
        return self._method(module, options)

    def _options(self, name: str) -> dict[str, Any]:
        """Those of the checkpoint, and over them those of the entry with the module's name, or else of the first one
        whose pattern is found in it."""
        own = self.by_name.get(name)
        if own is None:
            own = next((found for pattern, found in self.extra if self.patterns.is_in(pattern, name)), ())
        return dict(self.options) | dict(own)

    def _method(self, module: StoredModule, options: Mapping[str, Any]) -> QuantMethod:
        bits, group = options.get("bits", 4), options.get("group_size", 128)
        if self.packing in _FP8:
            return _fp8(module, group)
        if self.packing == _MX:
            return _mx(module, str(options.get("data_type", "")), bits, group)
        if not isinstance(group, int) or (group < 1 and group != -1):
            raise UnsupportedError(f"auto-round: {module.name}: group_size={group!r}", param="model")
        if self.packing == "auto_awq":
            if bits != 4:
                raise UnsupportedError(f"auto-round: {module.name}: bits={bits} packed as AWQ", param="model")
            return StoredAwq(module.dtype, max(group, 0))
        if bits not in (2, 3, 4, 8):
            raise UnsupportedError(f"auto-round: {module.name}: bits={bits}; known: 2, 3, 4, 8", param="model")
        return StoredGptq(module.dtype, bits, max(group, 0), self.packing in _GPTQ, False, ("g_idx",))

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names a packing that is not read."""
        whole = str(scheme.get("packing_format") or "auto_round:auto_gptq")
        packing = whole.removeprefix("auto_round:")
        packing = _ALIASES.get(packing, packing)
        if packing not in (*_GPTQ, *_OWN, "auto_awq", *_FP8, _MX):
            known = ", ".join((*_GPTQ, *_OWN, "auto_awq", *_FP8, _MX))
            raise UnsupportedError(f"auto-round: packing_format={whole}; known: {known}", param="model")
        if scheme.get("rotation_config"):
            raise UnsupportedError("auto-round: rotation_config: rotated inputs are not read", param="model")
        extra = {name: _given(own or {}) for name, own in (scheme.get("extra_config") or {}).items()}
        return cls(packing, _given(scheme), tuple(extra.items()), extra)


def _given(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Those that methods read, and that are not null."""
    return tuple((name, options[name]) for name in _OPTIONS if options.get(name) is not None)


def _mx(module: StoredModule, kind: str, bits: int, group: int) -> QuantMethod:
    """MXFP4, MXFP8 or NVFP4, which compressed-tensors lays out alike. UnsupportedError names what else there is."""
    if kind.startswith("mx_fp") and (bits, group) == (4, 32):
        return StoredFp4(module.dtype, 32)
    if kind.startswith("mx_fp") and (bits, group) == (8, 32):
        return StoredMxFp8(module.dtype)
    if kind.startswith("nv_fp") and (bits, group) == (4, 16):
        return StoredFp4(module.dtype, 16, "weight_global_scale", divides=True, unused=("input_global_scale",))
    what = f"data_type={kind!r}, bits={bits}, group_size={group!r}"
    raise UnsupportedError(f"auto-round: {module.name}: {what} in packing_format=auto_round:{_MX}", param="model")


def _fp8(module: StoredModule, group: Any) -> QuantMethod:
    """The method that the shape of its scales tells: one, one for each output, or blocks as DeepSeek's, whose size
    `group_size` says, else that shape."""
    here = module.tensors or {}
    if (blocks := here.get("weight_scale_inv")) is not None:
        if len(blocks.shape) != 2 or not min(blocks.shape):
            raise UnsupportedError(
                f"auto-round: {module.name}.weight_scale_inv has shape {list(blocks.shape)}, no blocks", param="model"
            )
        rows, columns = blocks.shape
        guess = (-(-module.num_outputs // rows), -(-module.num_inputs // columns))
        block = (group[0], group[1]) if isinstance(group, list) and len(group) == 2 and min(group) > 0 else guess
        return StoredFp8(module.dtype, block, scale="weight_scale_inv")
    scale = here.get("weight_scale")
    is_single = scale is not None and scale.whole().numel() == 1
    static = "input_scale" if "input_scale" in here else None
    return StoredFp8(module.dtype, PER_TENSOR if is_single else PER_OUTPUT, input_scale=static)
