"""Checkpoints that llm-compressor wrote as `FP8-dynamic`: e4m3 weights with a scale for each output channel, and
activations quantized for each token as they arrive. What `quantization: fp8` makes while loading, made beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from app.engine.quantization.base import Dim, Leaf, QuantMethod
from app.engine.quantization.fp8 import check_fp8
from app.errors import UnsupportedError
from app.kernels.gemm import PackedWeight
from app.kernels.gemm.fp8 import FP8, Fp8Weight
from app.platforms import platform_of

# What must be said of weights and activations: (key, value).
_WEIGHTS = (("num_bits", 8), ("type", "float"), ("strategy", "channel"), ("symmetric", True), ("dynamic", False))
_ACTIVATIONS = (("num_bits", 8), ("type", "float"), ("strategy", "token"), ("symmetric", True), ("dynamic", True))


class CompressedTensors(QuantMethod):
    """All linear layers alike; the output head is not quantized."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """The same conditions as for fp8 that is made while loading."""
        check_fp8("an fp8 checkpoint", "take one that is not quantized", device, dtype)

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """Weights [N, K] and scales [N, 1]."""
        return (
            Leaf("weight", FP8, (Dim("output"), Dim("input"))),
            Leaf("weight_scale", torch.float32, (Dim("output"), Dim("unit"))),
        )

    def pack(self, stored: Mapping[str, torch.Tensor]) -> PackedWeight:
        """UnsupportedError for sizes that fp8 tensor cores do not take."""
        weight = stored["weight"]
        if platform_of(weight.device).has_fp8_products and (weight.shape[0] % 16 or weight.shape[1] % 16):
            raise UnsupportedError(
                f"a quantized weight of {list(weight.shape)} on a rank is no multiple of 16; choose another "
                "tensor_parallel_size",
                param="tensor_parallel_size",
            )
        return Fp8Weight(weight, stored["weight_scale"])

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names what this checkpoint has otherwise."""
        groups = list((scheme.get("config_groups") or {}).values())
        if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
            raise UnsupportedError("compressed-tensors: layers quantized in unlike ways", param="model")
        for part, wanted in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
            given = groups[0].get(part) or {}
            odd = [f"{key}={given.get(key)!r}" for key, value in wanted if given.get(key) != value]
            if odd:
                raise UnsupportedError(f"compressed-tensors: {part} with {', '.join(odd)}", param="model")
        if set(scheme.get("ignore") or ()) - {"lm_head"}:
            raise UnsupportedError("compressed-tensors: some linear layers left as they were", param="model")
        return cls()
