"""Decides which attention backend runs on which device, and says why not another."""

from __future__ import annotations

from dataclasses import replace

import torch

from app.backends import ATTENTION_BACKENDS, EXACT_ATTENTION
from app.errors import ConfigError
from app.kernels.attention import AttentionOps
from app.platforms import platform_of


def select_attention(name: str, device: torch.device, *, exact: bool = False) -> tuple[AttentionOps, str]:
    """The backend `name` (`auto`: the platform's), and a line that says what was chosen and why.

    ConfigError when the backend cannot run on the device, or is not exact where it must be (`deterministic`). What
    layers want beyond plain attention they ask it themselves (`AttentionOps.require`).
    """
    platform = platform_of(device)
    chosen = (EXACT_ATTENTION[device.type] if exact else platform.attention_backend) if name == "auto" else name
    ops = _load(chosen)
    if exact and not ops.is_exact:
        raise ConfigError(
            f"attention_backend={chosen} is not exact, which deterministic wants; use auto", param="attention_backend"
        )
    if (refusal := _refusal(ops, device)) is not None:
        raise ConfigError(f"attention_backend={chosen} {refusal}; use auto", param="attention_backend")
    reasons = [platform.label]
    if name == "auto" and platform.is_async:  # on a host others need not even be installed
        reasons += [f"not {other}: {_why_not(other, ops, device)}" for other in ATTENTION_BACKENDS if other != chosen]
    return ops, f"attention: {chosen} ({'; '.join(reasons)})"


def _load(name: str) -> AttentionOps:
    try:
        ops: AttentionOps = ATTENTION_BACKENDS.load(name)
    except ModuleNotFoundError as error:  # Triton, on a machine without a GPU
        message = f"attention_backend={name}: {error.name} is not installed; use auto"
        raise ConfigError(message, param="attention_backend") from error
    return ops if ops.name == name else replace(ops, name=name)


def _refusal(ops: AttentionOps, device: torch.device) -> str | None:
    if device.type in ops.device_types:
        return None
    return "needs a " + " or a ".join(platform_of(torch.device(kind)).label for kind in ops.device_types)


def _why_not(name: str, chosen: AttentionOps, device: torch.device) -> str:
    """Says what the backend lacks that the chosen one has."""
    try:
        ops = _load(name)
    except ConfigError as error:
        return str(error.__cause__)
    if (refusal := _refusal(ops, device)) is not None:
        return refusal
    if chosen.is_capturable and not ops.is_capturable:
        return "it plans each step on the host"
    if chosen.shares_prefixes and not ops.shares_prefixes:
        return "it reads shared prefixes once for each request"
    return "by its name only"
