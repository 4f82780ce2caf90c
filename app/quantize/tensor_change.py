"""Says what calibration changes in a tensor of the checkpoint before it is rounded or written."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class TensorChange:
    """Factors of a weight [N, K], or of a vector [N] (a norm, a bias), which has rows only."""

    rows: torch.Tensor | None = None  # fp32 [N]
    columns: torch.Tensor | None = None  # fp32 [K]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The changed tensor in fp32."""
        tensor = tensor.float()
        if self.rows is not None:
            tensor = tensor * self.rows.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))
        return tensor if self.columns is None else tensor * self.columns.to(tensor.device)
