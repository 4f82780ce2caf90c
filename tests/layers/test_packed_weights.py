"""Layers whose weights were packed answer as before, and hold no second copy."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.kernels.gemm import DeferredNorm, PackedWeight, materialize, onednn
from app.kernels.gemm.parts import PackedParts, UnpackedWeight
from app.layers.context import BuildContext
from app.layers.epilogue import PLAIN, ActMul, AddNorm
from app.layers.linear import ColumnLinear, Linear
from app.layers.norm import RMSNorm
from app.layers.vocab import LMHead, VocabEmbedding
from app.loading.loader import load_model
from app.worker.attention.backend import select_attention
from tests.tiny_models import hf_model, tiny_model

CPU, EPS = torch.device("cpu"), 1e-5
pytestmark = pytest.mark.skipif(not onednn.works(torch.float32), reason="this build of PyTorch has no oneDNN")


def context(rank: int = 0, size: int = 1) -> BuildContext:
    tp = RankGroup(rank, size, cast("Any", object()) if size > 1 else None)
    return BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups(tp=tp))


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_share_of_a_layer(bias: bool) -> None:
    layer = ColumnLinear(context(rank=1, size=2), 512, 1024, bias=bias)
    for parameter in layer.parameters():
        parameter.data.normal_()
    weight, x = layer.weight.data.clone(), torch.randn(3, 512)
    layer.pack()
    assert layer.packed is not None
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias), rtol=0, atol=1e-3)


class Doubled(PackedWeight):
    """A kernel that knows the product alone; its weight counts twice, so that nobody multiplies by the tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, 2 * self.weight, bias)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_stored_unlike_are_products_apart(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = ColumnLinear(context(), 8, 6, bias=bias)
    for parameter in layer.parameters():
        parameter.data.normal_()
    weight, x = layer.weight.data.clone(), torch.randn(3, 8)
    parts = PackedParts((Doubled(weight[:4]), UnpackedWeight(weight[4:])), (4, 2))
    monkeypatch.setattr("app.layers.linear.pack_stored", lambda _: parts)
    layer.pack()
    expected = torch.cat([F.linear(x, 2 * weight[:4]), F.linear(x, weight[4:])], 1)
    expected = expected if layer.bias is None else expected + layer.bias
    found = layer.apart(x)
    assert len(found.products) == (1 if bias else 2)  # a bias is added to what is whole
    torch.testing.assert_close(found.whole(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def test_what_follows_a_product_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, norm = ColumnLinear(context(), 8, 6, bias=True), RMSNorm(context(), 6, EPS)
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.data.normal_()
    weight, x, residual = layer.weight.data.clone(), torch.randn(3, 8), torch.randn(3, 6)
    monkeypatch.setattr("app.layers.linear.pack_stored", lambda _: Doubled(weight))
    layer.pack()
    assert layer.bias is not None
    truth = x @ (2 * weight.T) + layer.bias
    torch.testing.assert_close(layer(x), truth)
    gate, up = truth.chunk(2, dim=-1)
    torch.testing.assert_close(layer(x, ActMul(context(), "silu")), F.silu(gate) * up)
    normed, total = layer(x, AddNorm(residual, norm))
    torch.testing.assert_close(total, truth + residual)
    torch.testing.assert_close(materialize(normed), F.rms_norm(truth + residual, (6,), norm.weight, EPS))
    deferred = DeferredNorm(x, x.square().sum(1, keepdim=True), EPS)
    torch.testing.assert_close(layer(deferred), F.rms_norm(x, (8,), None, EPS) @ (2 * weight.T) + layer.bias)


def test_the_weight_is_freed_and_its_shape_kept() -> None:
    layer = ColumnLinear(context(), 512, 1024, bias=False)
    layer.pack()
    assert layer.weight.is_meta
    assert layer.weight.shape == (1024, 512)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_keeps_the_table_that_the_embedding_reads(tied: bool) -> None:
    embedding, head = VocabEmbedding(context(), 1024, 512), LMHead(context(), 1024, 512)
    if tied:
        head.tie(embedding)
    embedding.weight.data.normal_()
    head.weight.data.normal_()
    table, hidden = head.weight.data.clone(), torch.randn(3, 512)
    head.pack()
    torch.testing.assert_close(head(hidden), F.linear(hidden, table), rtol=0, atol=1e-3)
    assert not embedding.weight.is_meta
    assert head.weight.is_meta is not tied
    assert embedding(torch.tensor([5])).shape == (1, 512)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_loaded_model_is_packed_where_it_pays(load_format: str) -> None:
    directory = tiny_model("qwen2", hidden_size=512, intermediate_size=768, num_hidden_layers=1)
    model = load_model(ModelInfo.from_directory(str(directory)), context(), load_format, seed=0)
    packed = {name for name, module in model.named_modules() if isinstance(module, Linear) and module.packed}
    assert packed == {"model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"}
    if load_format == "safetensors":
        x = torch.randn(4, 512)
        theirs = hf_model(directory).model.layers[0].mlp(x)  # type: ignore[operator]
        ours = model.model.layers["0"].mlp(x, PLAIN)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
