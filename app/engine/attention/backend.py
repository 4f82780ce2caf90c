"""Which attention backend runs on which device."""

from __future__ import annotations

import torch

from app.errors import ConfigError
from app.kernels.attention import ATTENTION_BACKENDS, AttentionOps


def select_attention(name: str, device: torch.device) -> tuple[AttentionOps, str]:
    """The backend `name` (`auto`: by device), and a line that says what was chosen.

    ConfigError when the backend cannot run on the device.
    """
    kind = "CPU" if device.type == "cpu" else "GPU"
    chosen = name if name != "auto" else ("torch" if device.type == "cpu" else "triton")
    if chosen == "triton" and device.type != "cuda":
        raise ConfigError("attention_backend=triton needs a GPU; use auto or torch", param="attention_backend")
    return ATTENTION_BACKENDS.load(chosen), f"attention: {chosen} ({kind})"
