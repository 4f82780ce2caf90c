"""Checkpoints of GPT-OSS as published: experts in OCP's MXFP4, everything else as it was (`quant_method: mxfp4`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from app.quantization.base import QuantMethod, StoredModule
from app.quantization.stored_fp4 import StoredFp4

GROUP = 32  # inputs that share a scale


@dataclass(slots=True, frozen=True)
class Mxfp4(QuantMethod):
    """Whatever `modules_to_not_convert` says, only experts are stored so."""

    plain: tuple[str, ...] = ()  # names, or patterns of them, of modules that are not

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """See QuantMethod."""
        is_expert = ".experts" in module.name
        is_plain = any(fnmatch(module.name, pattern) or pattern in module.name for pattern in self.plain)
        return StoredFp4(module.dtype, GROUP) if is_expert and not is_plain and not module.is_plain else None

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """See QuantMethod."""
        return cls(tuple(scheme.get("modules_to_not_convert") or ()))
