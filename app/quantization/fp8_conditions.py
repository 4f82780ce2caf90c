"""Tells where fp8 can be computed."""

from __future__ import annotations

import torch

from app.errors import ConfigError
from app.platforms import platform_of


def check_fp8(what: str, remedy: str, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError where `what` cannot be computed; `remedy` says what to do."""
    platform = platform_of(device)
    if (refusal := platform.fp8_refusal(device)) is not None:
        raise ConfigError(f"{what}: {refusal}; {remedy}", param="quantization")
    if platform.has_fp8_products and dtype != torch.bfloat16:
        given = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{what} needs dtype=bfloat16 on a GPU, not {given}", param="quantization")
