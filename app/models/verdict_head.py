"""A language model's yes or no as the score of a text."""

from __future__ import annotations

import torch
from torch import nn

from app.layers.context import BuildContext
from app.layers.vocab import LMHead, VocabEmbedding
from app.models.decoder import scaled
from app.models.decoder_settings import DecoderSettings
from app.records.verdict import Verdict


class VerdictHead(nn.Module):
    """The language head's logit of one token, less that of another."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, verdict: Verdict, table: VocabEmbedding) -> None:
        super().__init__()
        self.settings, self.verdict, self.dtype = settings, verdict, ctx.dtype
        size = settings.embedding_size or settings.hidden_size
        self.head = LMHead(ctx, settings.vocab_size, size, settings.head_bias)
        if settings.tie_word_embeddings:
            self.head.tie(table)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, 1]."""
        logits = scaled(self.head(pooled.to(self.dtype)), self.settings).float()
        yes, no = self.verdict.yes, self.verdict.no
        score = logits[:, yes : yes + 1]
        return score if no is None else score - logits[:, no : no + 1]
