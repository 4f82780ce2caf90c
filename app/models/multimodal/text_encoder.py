"""The encoder of a model that reads a text and writes an answer to it: every rank holds it whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.kernels.attention.encoder import EncoderPlan, plan_encoder
from app.layers.context import BuildContext
from app.layers.replicated import ReplicatedTable
from app.models.encoder_decoder import InputEncoder, encoder_info


class TextEncoder(InputEncoder):
    """Texts of several lengths side by side."""

    layers: nn.ModuleDict

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        self.info = encoder_info(info)
        self.embed_tokens = ReplicatedTable(ctx, info.vocab_size, info.hidden_size)
        self._device = ctx.device

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """See InputEncoder."""
        counts = [len(text) for text in inputs]
        ids = torch.cat(list(inputs))
        places = torch.cat([torch.arange(count, device=ids.device) for count in counts])
        return self.encoded(ids, places, plan_encoder([0, *accumulate(counts)], ids.device))

    @abstractmethod
    def encoded(self, ids: torch.Tensor, places: torch.Tensor, plan: EncoderPlan) -> torch.Tensor:
        """Tokens [T] and their places in their texts -> states [T, C]."""

    def largest(self) -> torch.Tensor:
        """See InputEncoder."""
        return torch.zeros(self.info.num_positions, dtype=torch.int32, device=self._device)
