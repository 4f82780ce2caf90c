"""Which attention backend runs on which device."""

from __future__ import annotations

import torch

from app.backends import ATTENTION_BACKENDS
from app.errors import ConfigError
from app.kernels.attention import AttentionOps
from app.platforms import platform_of


def select_attention(name: str, device: torch.device) -> tuple[AttentionOps, str]:
    """The backend `name` (`auto`: by device), and a line that says what was chosen.

    ConfigError when the backend cannot run on the device.
    """
    platform = platform_of(device)
    chosen = platform.attention_backend if name == "auto" else name
    try:
        ops: AttentionOps = ATTENTION_BACKENDS.load(chosen)
    except ModuleNotFoundError as error:  # Triton, on a machine without a GPU
        message = f"attention_backend={chosen}: {error.name} is not installed; use auto"
        raise ConfigError(message, param="attention_backend") from error
    if device.type not in ops.device_types:
        kinds = " or a ".join(platform_of(torch.device(kind)).label for kind in ops.device_types)
        raise ConfigError(f"attention_backend={chosen} needs a {kinds}; use auto", param="attention_backend")
    return ops, f"attention: {chosen} ({platform.label})"
