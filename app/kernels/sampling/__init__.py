"""Sampling kernels: counter-based randomness (I6), Gumbel-argmax, and the top-k / top-p / min-p filters.

Invariant I6 rests here: a random number is a pure function of its key (seed, choice index, purpose) and its counter
(absolute position, token id), so it is the same alone or in a batch, on any device, after preemption or migration.
`philox.py` holds the generator, `reference.py` the plain PyTorch truth and CPU path of the rest, `triton_ops.py` the
one-pass draw for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch

from app.kernels.sampling.philox import uniform
from app.kernels.sampling.reference import apply_min_p, apply_top_k_top_p
from app.registry import Registry

__all__ = ["GUMBEL_ARGMAX", "Purpose", "apply_min_p", "apply_top_k_top_p", "gumbel_argmax", "uniform"]

GUMBEL_ARGMAX: Registry[Callable[..., torch.Tensor]] = Registry(
    "device for gumbel_argmax",
    {
        "cpu": "app.kernels.sampling.reference:gumbel_argmax",
        "cuda": "app.kernels.sampling.triton_ops:gumbel_argmax",
    },
)


class Purpose(IntEnum):
    """What a random number is for: different purposes at the same position draw independent numbers."""

    SAMPLE = 0


def gumbel_argmax(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, purpose: int = Purpose.SAMPLE
) -> torch.Tensor:
    """Draw one token a row from softmax(logits): fp32 [N, V] -> int64 [N].

    keys int64 [N, 2] holds (seed, choice index), positions int64 [N] the absolute position of the token drawn. A
    token of logit -inf is never drawn, as long as its row has a finite one.
    """
    return GUMBEL_ARGMAX.load(logits.device.type)(logits, keys, positions, purpose=int(purpose))
