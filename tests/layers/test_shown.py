"""What a step shows stands in the places of its tokens, and is added behind the first layers."""

from __future__ import annotations

import torch

from app.layers.shown import Shown, show


def test_embeddings_go_where_they_are_shown() -> None:
    inputs: dict[str, torch.Tensor] = {}
    x, rows = torch.randn(6, 4), torch.tensor([4, 1])
    assert Shown(inputs).put(x) is x
    assert Shown(inputs).num_deep == 0
    embeddings = torch.randn(3, 2, 4)
    show(inputs, rows, embeddings)
    shown = Shown(inputs)
    assert shown.num_deep == 2
    put, added = shown.put(x), shown.add(1, x)
    for token in range(6):
        own = {4: 0, 1: 1}.get(token)
        torch.testing.assert_close(put[token], x[token] if own is None else embeddings[0, own])
        torch.testing.assert_close(added[token], x[token] if own is None else x[token] + embeddings[2, own])
