"""A model that runs layer by layer computes what transformers does, whatever else is in the batch."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from app.layers.linear import Linear
from app.quantize.layerwise import LayerObserver, LayerwiseModel, LoadedLayer
from app.quantize.token_batch import TokenBatch
from tests.quantize.models import judge_logits, speaking_model

TEXTS = [[5, 9, 200], list(range(40, 75)), [7, 3]]


class Layers(LayerObserver):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.parameters: list[int] = []
        self.linears: list[weakref.ref[Linear]] = []

    def begin(self, layer: LoadedLayer) -> None:
        self.seen.append(f"begin {layer.index}")
        assert all(linear() is None for linear in self.linears), "a layer before it is still in memory"
        self.linears += [weakref.ref(module) for module in layer.model.modules() if isinstance(module, Linear)]
        self.parameters.append(sum(parameter.numel() for parameter in layer.model.parameters()))

    def after_batch(self, layer: LoadedLayer) -> None:
        self.seen.append("batch")

    def end(self, layer: LoadedLayer) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    source = speaking_model(tmp_path / "model", family, num_hidden_layers=3)
    batches, layers = [TokenBatch(TEXTS[:2]), TokenBatch(TEXTS[2:])], Layers()
    gc.disable()  # or it might free by chance what is not let go of
    try:
        states = LayerwiseModel(str(source), "cpu").run(batches, [layers])
    finally:
        gc.enable()
    found = states.last.logits(torch.cat(list(states.hidden)))
    expected = torch.cat([judge_logits(source, text) for text in TEXTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert layers.seen == [step for n in range(3) for step in (f"begin {n}", "batch", "batch", "end")]
    assert layers.parameters[1] < layers.parameters[0], "the embedding is in the first only"


def test_batches_hold_all_texts_in_order() -> None:
    texts = [[1] * 3000, [2] * 2000, [3] * 5000, [4], [5]]
    batches = TokenBatch.split(texts)
    assert [text for batch in batches for text in batch.texts] == texts
    assert [len(batch.input_ids) for batch in batches] == [3000, 2000, 5000, 2]
    slots = TokenBatch([[1] * 20, [2] * 3]).metadata(torch.device("cpu")).slot_mapping
    assert slots.tolist() == [*range(20), 32, 33, 34]
