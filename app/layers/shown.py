"""Embeddings of pictures in a step: they stand in for those of placeholder tokens, and add to what early layers
give."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.layers.context import ForwardContext

ROWS, EMBEDDINGS = "shown_rows", "shown_embeddings"  # among what features bring


class Shown:
    """The embeddings of n tokens of a step, as a feature of the worker brought them."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self._rows = inputs.get(ROWS)  # int64 [n] which of the step's tokens
        # [1 + L, n, C]: in place of the tokens' own, then for L layers.
        self._embeddings = None if self._rows is None else inputs[EMBEDDINGS]

    @classmethod
    def of(cls, ctx: ForwardContext) -> Shown:
        """Returns what the step shows."""
        return cls(ctx.inputs)

    @property
    def has_any(self) -> bool:
        """True if the step shows something."""
        return self._rows is not None

    @property
    def num_deep(self) -> int:
        """First layers to whose outputs features are added (DeepStack: Meng et al., 2024)."""
        return 0 if self._embeddings is None else len(self._embeddings) - 1

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """Embedded tokens [T, C] with pictures in their places."""
        if self._rows is None or self._embeddings is None:
            return x
        return x.index_copy(0, self._rows, self._embeddings[0])

    def add(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The output [T, C] of one of the first layers with its features."""
        assert self._rows is not None
        assert self._embeddings is not None
        return x.index_add(0, self._rows, self._embeddings[1 + layer])


def without_shown(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same inputs of a step that shows nothing."""
    return {name: value for name, value in inputs.items() if name not in (ROWS, EMBEDDINGS)}


def show(inputs: dict[str, torch.Tensor], rows: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Bring tokens `rows` int64 [n] of a step their embeddings [1 + L, n, C]."""
    inputs[ROWS], inputs[EMBEDDINGS] = rows, embeddings
