"""Brings what Gemma 3n sees or hears into the space of its text, and the marks where that begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from app.checkpoints.fields.kinds import check, number, whole
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.names import Rule
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.derived_layer import DerivedLayer
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear, ReplicatedTable

RULES: tuple[Rule, ...] = ((r"^embed_(vision|audio)\.", "embedder."),)
_FIELDS = {
    **{"vocab_size": whole(1, 1 << 16), "vocab_offset": whole(0, 1 << 24)},
    "rms_norm_eps": number(above=0, most=1),
}


class Embedder(DerivedLayer):
    """norm(projection(norm(x))) of vectors that a tower gives, or of rows of its own table."""

    def __init__(self, ctx: BuildContext, info: ModelInfo, own: Mapping[str, Any], size: int, where: str) -> None:
        super().__init__()
        check(own, _FIELDS, where)
        self.eps, self.count = float(own.get("rms_norm_eps", 1e-6)), int(own.get("vocab_size", 128))
        usual = 262_144 if "vision" in where else 262_272
        self.first, self.shape = int(own.get("vocab_offset", usual)), (info.hidden_size,)  # token of the table's row 0
        self.embedding = ReplicatedTable(ctx, self.count, size)
        self.hard_embedding_norm, self.soft_embedding_norm = (RMSNorm(ctx, size, self.eps) for _ in range(2))
        self.embedding_projection = ReplicatedLinear(ctx, size, info.hidden_size, bias=False)
        self._rows: torch.Tensor | None = None

    def place_of(self, token: int, where: str) -> int:
        """The table's row of a token; CheckpointError where it has none."""
        if not 0 <= token - self.first < self.count:
            raise CheckpointError(
                f"{where}: vocab_offset={self.first} leaves token {token} without a row", param="model"
            )
        return token - self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A tower's [..., size] -> [..., C]."""
        return self._projected(self.soft_embedding_norm(x))

    def derive(self) -> None:
        """See DerivedLayer: the rows of all of the table's tokens, which are few."""
        rows = self._projected(self.hard_embedding_norm(self.embedding.weight))
        if self._rows is None:
            self._rows = rows
        else:
            self._rows.copy_(rows)

    @property
    def rows(self) -> torch.Tensor:
        """The table's rows in the space of the text, [count, C]."""
        assert self._rows is not None, "nobody has said that the weights are there"
        return self._rows

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(self.embedding_projection(x), self.shape, None, self.eps)


class MarkEmbeddings:
    """Puts embeddings of the tokens beyond the text's own into a step's; those of a table end where the next begins."""

    def __init__(self, embedders: tuple[Embedder, ...]) -> None:
        self._embedders = sorted(embedders, key=lambda embedder: embedder.first)

    def __call__(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """int [T] and embeddings [T, C] -> the same with those of marks."""
        for embedder in self._embedders:
            places = input_ids.long() - embedder.first
            rows = embedder.rows[places.clamp(0, embedder.count - 1)]
            x = torch.where((places >= 0)[:, None], rows, x)
        return x
