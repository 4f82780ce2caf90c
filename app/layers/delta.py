"""The contract of what some rows of a step add to a linear layer's product: low-rank adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from app.kernels.gemm import Inputs


class Delta(ABC):
    """One layer's. Steps without such rows run as if it were not there."""

    @property
    @abstractmethod
    def is_wanted(self) -> bool:
        """True if the step that is being computed has such rows."""

    @abstractmethod
    def add(self, x: Inputs, y: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        """y [T, N] + what x [T, K] gives in those rows; the others keep their bits. `in_place`: y may be
        overwritten."""
