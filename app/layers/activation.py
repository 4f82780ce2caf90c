"""Activation functions by the names that Hugging Face configurations give them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from app.errors import UnsupportedError
from app.kernels.fused import GatedActivation, PlainActivation

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
}


# Those that a kernel computes together with the product they are multiplied by.
GATED_ACTIVATIONS: dict[str, GatedActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}

# Those that a kernel computes behind a product without a gate.
PLAIN_ACTIVATIONS: dict[str, PlainActivation] = {**GATED_ACTIVATIONS, "relu2": "relu2"}


def activation(name: str) -> Activation:
    """The function `name`; UnsupportedError lists what exists."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"unknown hidden_act {name!r}; known: {', '.join(sorted(ACTIVATIONS))}", param="model")
    return ACTIVATIONS[name]
