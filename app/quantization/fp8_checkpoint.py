"""Checkpoints of `quant_method` fp8 (DeepSeek-V3, arXiv 2412.19437, and those that vLLM and AutoFP8 write) and
fbgemm_fp8: e4m3 weights, with scales by block, by output or of the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from app.errors import UnsupportedError
from app.kernels.gemm.fp8 import FP8
from app.quantization.base import QuantMethod, ReadableTensor, StoredModule
from app.quantization.fp8_conditions import check_fp8
from app.quantization.stored_fp8 import PER_OUTPUT, PER_TENSOR, StoredFp8

_STATIC = ("input_scale", "activation_scale")
_SCALES = ("weight_scale", "weight_scale_inv")  # both multiply; transformers writes the second one of tensors, too


@dataclass(slots=True, frozen=True)
class Fp8Checkpoint(QuantMethod):
    """A whole checkpoint: the modules whose weights lie there in fp8."""

    block: tuple[int, int] | None
    static: bool  # activations have a scale that is stored
    skipped: tuple[str, ...]
    most: float | None = None  # of activations, as fbgemm_fp8 bounds them

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """The same conditions as for fp8 that is made while loading."""
        check_fp8("an fp8 checkpoint", "take one that is not quantized", device, dtype)

    @property
    def is_uniform(self) -> bool:
        """See QuantMethod: blocks have a scale each, wherever they lie."""
        return self.block is not None

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """Decides by what lies there; without a checkpoint, by the names of modules left as they were."""
        if module.tensors is None:
            skipped = module.kind != "linear" or any(is_named(name, module.name) for name in self.skipped)
            block = self.block or PER_TENSOR
            return None if skipped else StoredFp8(module.dtype, block, self._scale(block), most=self.most)
        weight = module.tensors.get("weight")
        if module.is_plain or weight is None or weight.dtype != FP8 or module.kind == "embedding":
            return None
        return self._of_tensors(module, module.tensors)

    def _of_tensors(self, module: StoredModule, tensors: Mapping[str, ReadableTensor]) -> StoredFp8:
        static = next((name for name in _STATIC if self.static and name in tensors), None)
        unused = tuple(name for name in (*_STATIC, "input_scale_ub") if name != static)
        if self.block is not None:
            return StoredFp8(module.dtype, self.block, self._scale(self.block), unused=(*_STATIC, "input_scale_ub"))
        name = next((name for name in _SCALES if name in tensors), _SCALES[0])
        per_output = name in tensors and torch.Size(tensors[name].shape).numel() == module.num_outputs > 1
        return StoredFp8(module.dtype, PER_OUTPUT if per_output else PER_TENSOR, name, static, unused, self.most)

    def _scale(self, block: tuple[int, int]) -> str:
        return "weight_scale_inv" if self.block == block else "weight_scale"

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names what this checkpoint has otherwise."""
        block, activations = scheme.get("weight_block_size"), scheme.get("activation_scheme", "dynamic")
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise UnsupportedError(f"fp8: weight_block_size={block}", param="model")
        if activations not in ("dynamic", "static") or (block and activations == "static"):
            raise UnsupportedError(f"fp8: activation_scheme={activations}", param="model")
        if (kind := scheme.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedError(f"fp8: fmt={kind}", param="model")
        skipped = scheme.get("modules_to_not_convert") or scheme.get("ignored_layers") or ()
        size, most = None if block is None else (block[0], block[1]), scheme.get("activation_scale_ub")
        return cls(size, activations == "static", tuple(skipped), None if most is None else float(most))


def is_named(name: str, module: str) -> bool:
    """True if `name` is a module's, one around it, or the last part of one."""
    return name == module or module.startswith(f"{name}.") or module.endswith(f".{name}")
