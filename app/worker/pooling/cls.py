"""The first token stands for the text, as in BERT's classifiers."""

from __future__ import annotations

import torch

from app.worker.pooling.base import Pooling


class ClsPooling(Pooling):
    """Hidden state of the first token."""

    def of_step(self, hidden: torch.Tensor, starts: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """First row of each request."""
        return hidden[starts[:-1]].float()

    def merge(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """The state of the first chunk, which has the first token."""
        return earlier
