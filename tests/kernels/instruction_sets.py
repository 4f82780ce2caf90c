"""Reasons of skips that tell an old processor, which CI may have, from a build of PyTorch that lost a product."""

from __future__ import annotations

import torch


def why_it_lacks(what: str) -> str:
    """Returns a reason to skip a test of `what`, which PyTorch does on processors with AVX-512 only."""
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        return f"this processor has no AVX-512, so no {what}"
    return f"this build of PyTorch has no {what}"
