"""The last token stands for the text: in a decoder, the only one that has seen all of it."""

from __future__ import annotations

import torch

from app.worker.pooling.base import Pooling


class LastPooling(Pooling):
    """Hidden state of the last token."""

    def of_step(self, hidden: torch.Tensor, starts: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Last row of each request."""
        return hidden[starts[1:] - 1].float()

    def merge(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """The state of the last chunk, which has the last token."""
        return later
