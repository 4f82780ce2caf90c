"""Says which steps' launches over states begin before the launch before them has ended."""

from __future__ import annotations

import torch

from app.kernels.launch import early_launch
from app.kernels.recurrent import StateStep

MOST_REQUESTS = 8  # measured on an H200; of more, programs that wait take room from those that work


def early_step(device: torch.device, step: StateStep) -> dict[str, bool]:
    """`early_launch` of a step of few requests that bring few tokens. Before `gdc_wait` a delta net may read states and
    what is said of them: the launch before it is its convolution, which waits itself and writes none of it."""
    return early_launch(device) if step.num_long == 0 and step.num_short <= MOST_REQUESTS else {"EARLY": False}
