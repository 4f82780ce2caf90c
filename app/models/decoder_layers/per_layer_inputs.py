"""Embeddings of tokens for each layer (Gemma 3n, 4), beside that which the first layer reads."""

from __future__ import annotations

import torch

from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.vocab import VocabEmbedding
from app.models.decoder_settings import DecoderSettings

KEY = "per_layer_inputs"  # in ForwardContext.memo: [T, layers, size]


class PerLayerInputs(Layer):
    """(a table's row of the token + a norm of a projection of its embedding) / sqrt(2), a vector for each layer."""

    key = KEY
    placeholders: tuple[int, ...] = ()  # tokens that stand for what is no text: the table's row is the padding token's
    padding: int = 0

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, vocab_size: int, size: int) -> None:
        super().__init__()
        self.size, width = size, settings.num_layers * size
        self.is_smaller = vocab_size < settings.vocab_size
        self.embed_tokens = VocabEmbedding(ctx, vocab_size, width)
        self.projection = ReplicatedLinear(ctx, settings.hidden_size, width, bias=False)
        self.norm = RMSNorm(ctx, size, settings.norm_eps)
        # In the model's type, as the table that it multiplies.
        self.scale = float(torch.tensor(size**0.5, dtype=ctx.dtype, device="cpu"))
        self.shrink = settings.hidden_size**-0.5

    def as_read(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The tokens [T] of a step that shows something, as the table knows them."""
        for token in self.placeholders:
            input_ids = input_ids.masked_fill(input_ids == token, self.padding)
        return input_ids

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """int [T] and their embeddings [T, C] -> [T, layers, size]."""
        shape = len(input_ids), -1, self.size
        if self.is_smaller:  # what sees and hears has token ids beyond the table
            input_ids = input_ids.where(input_ids < self.embed_tokens.vocab_size, 0)
        of_token = (self.embed_tokens(input_ids) * self.scale).view(shape)
        of_embedding = self.norm((self.projection(embedded) * self.shrink).view(shape))
        inputs: torch.Tensor = (of_embedding + of_token) * 2.0**-0.5
        return inputs
