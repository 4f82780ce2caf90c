"""Tables whose names are choices in the configuration; they are here because reading them must not import torch (I8).

A new backend is one file and one line of its table: `app/config.py`, the command line and their help follow.
"""

from __future__ import annotations

from typing import Any

from app.registry import Registry

# AttentionOps (app/kernels/attention).
ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention backend",
    {
        "torch": "app.kernels.attention.reference:OPS",
        "triton": "app.kernels.attention.triton_ops:OPS",
    },
)
AUTO_ATTENTION = {"cpu": "torch", "cuda": "triton"}  # what `auto` means, by the type of the device

# Classes of QuantMethod (app/engine/quantization), by the names of `quantization` and of checkpoints' `quant_method`.
QUANT_METHODS: Registry[Any] = Registry(
    "quantization",
    {
        "fp8": "app.engine.quantization.fp8:Fp8Method",
        "compressed-tensors": "app.engine.quantization.compressed_tensors:CompressedTensors",
    },
)
