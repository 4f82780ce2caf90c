"""The contract of what some rows of a step add to a linear layer's product: low-rank adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from app.kernels.gemm import Inputs, LinearOps


class Delta(ABC):
    """One layer's. Steps without such rows run as if it were not there."""

    ops: LinearOps[Any]  # products with what `over` gives

    @property
    @abstractmethod
    def is_wanted(self) -> bool:
        """True if the step that is being computed has such rows."""

    @abstractmethod
    def over(self, ops: LinearOps[Any], weight: Any) -> Any:
        """The layer's weight, which `ops` multiply by, with what this step's rows add; other rows keep their bits."""

    @abstractmethod
    def add(self, x: Inputs, y: torch.Tensor) -> torch.Tensor:
        """The same for a product that stands: y [T, N], which is overwritten, + what x [T, K] gives; of an embedding x
        int [T] says which row each token has, below 0: none of this rank's."""


class PairDelta(ABC):
    """The same of a product of experts, whose rows are pairs of a token and one of its experts."""

    @property
    @abstractmethod
    def is_wanted(self) -> bool:
        """True if the step that is being computed has rows to which something is added."""

    @abstractmethod
    def add(self, x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See app.kernels.moe.AddToRows."""
