"""Makes a vector and a weight of each token besides the text's vector, as BGE-M3 does (Chen et al., 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.records.pooling_info import TokenHeadsInfo
from app.records.pooling_params import PoolingParams
from app.worker.pooling.heads import Dense


class TokenHeads:
    """Two linear layers over the tokens of a whole text. The first token's vector is the text's, not its own."""

    def __init__(self, info: TokenHeadsInfo, device: torch.device, dummy: bool) -> None:
        self._vectors = Dense(info.vectors, device, dummy)
        self._weights = Dense(info.weights, device, dummy)

    def __call__(self, x: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Hidden states fp32 [T, C] of a text -> vectors of its tokens behind the first [T - 1, E], weights of all
        [T, 1], or both, with the text's vector before them [T, E + 1]."""
        if params.task == "token_classify":
            return self._weights(x)
        vectors = self._vectors(x[1:])
        if params.task == "token_embed":
            return _unit(vectors, params)
        rows = _unit(torch.cat([x[:1], vectors]), params)
        return torch.cat([rows, self._weights(x)], dim=1)


def _unit(vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    return vectors if params.use_activation is False else F.normalize(vectors, dim=1)
