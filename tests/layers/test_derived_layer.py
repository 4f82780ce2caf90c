"""Layers are told when weights are there, wherever in a model they stand."""

from __future__ import annotations

import torch
from torch import nn

from app.layers.derived_layer import DerivedLayer, derive


class Doubled(DerivedLayer):
    """Keeps the double of another layer's weight."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.of, self.kept = of, torch.zeros(2, 2)

    def derive(self) -> None:
        self.kept.copy_(2 * self.of.weight)


def test_layers_compute_what_they_keep_in_place_and_anew() -> None:
    source = nn.Linear(2, 2, bias=False).requires_grad_(False)
    layer = Doubled(source)
    model = nn.Sequential(source, nn.ModuleList([layer]))
    place = layer.kept.data_ptr()
    for value in (1.0, 3.0):
        source.weight.fill_(value)
        derive(model)
        assert layer.kept.tolist() == [[2 * value] * 2] * 2
    assert layer.kept.data_ptr() == place
