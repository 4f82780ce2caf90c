"""The two layers over tokens against plain products; transformers judges the whole in tests/api/pooling."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from app.records.pooling_info import DenseInfo, TokenHeadsInfo
from app.records.pooling_params import PoolingParams
from app.worker.pooling.token_heads import TokenHeads


def test_each_and_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {}
    for name, size in (("v.pt", 8), ("w.pt", 1)):
        layers[name] = {"weight": torch.randn(size, 8), "bias": torch.randn(size)}
        torch.save(layers[name], tmp_path / name)
    vectors = DenseInfo(tmp_path, 8, 8, bias=True, activation="identity", file="v.pt")
    weights = DenseInfo(tmp_path, 8, 1, bias=True, activation="relu", file="w.pt")
    heads = TokenHeads(TokenHeadsInfo(vectors, weights), torch.device("cpu"), dummy=False)
    x = torch.randn(7, 8)
    plain = x[1:] @ layers["v.pt"]["weight"].T + layers["v.pt"]["bias"]
    weight = (x @ layers["w.pt"]["weight"].T + layers["w.pt"]["bias"]).clamp(min=0)
    torch.testing.assert_close(heads(x, PoolingParams(task="token_embed")), F.normalize(plain, dim=1))
    torch.testing.assert_close(heads(x, PoolingParams(task="token_embed", use_activation=False)), plain)
    torch.testing.assert_close(heads(x, PoolingParams(task="token_classify")), weight)
    both = heads(x, PoolingParams(task="all"))
    torch.testing.assert_close(both[:, :-1], F.normalize(torch.cat([x[:1], plain]), dim=1))
    torch.testing.assert_close(both[:, -1:], weight)
