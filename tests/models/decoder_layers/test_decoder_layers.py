"""Each kind of layer joins its blocks as its formula says; the families that take it are held to transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from app.layers.attention import Attention
from app.layers.context import ForwardContext
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm, RMSNorm
from app.models import families
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_layers.one_block import OneBlockLayer
from app.models.decoder_layers.parallel import ParallelLayer, TwoNormParallelLayer
from app.models.decoder_layers.partial import PartialLayer
from app.models.decoder_layers.post_norm import NormedSumLayer, PostNormLayer
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_layers.sandwich import SandwichLayer
from app.models.decoder_layers.shortcut import ShortcutLayer
from app.models.decoder_layers.weighed_sums import WeighedSumLayer

WIDTH = 6


class Times(Norm):
    """A norm that multiplies, each one by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.rand(()) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Block(nn.Module):
    """A product, and what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.randn(WIDTH, WIDTH)
        self.ctx: Any = None

    def __call__(self, x: torch.Tensor, epilogue: Any = None, ctx: Any = None) -> Any:
        self.ctx = ctx or self.ctx
        return x @ self.matrix if epilogue is None else epilogue.after(epilogue.read(x) @ self.matrix)


@dataclass
class Settings:
    residual_scale: float = 0.25
    experts: None = None
    hidden_size: int = WIDTH


BLOCKS = Blocks(norm=lambda *_: Times(), attention=lambda *_: Block(), mlp=lambda *_: Block())  # type: ignore[arg-type, return-value]
FAMILY_FILES = [f"app.models.families.{path.stem}" for path in sorted(Path(families.__file__).parent.glob("[a-z]*.py"))]
STEP = ForwardContext(torch.arange(3), [], [])
Formula = Callable[[Any, torch.Tensor], torch.Tensor]


def pre_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + 0.25 * layer.self_attn(layer.input_layernorm(x))
    return x + 0.25 * layer.mlp(layer.post_attention_layernorm(x))


def sandwich(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + layer.post_attention_layernorm(layer.self_attn(layer.input_layernorm(x)))
    return x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))


def post_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + layer.post_attention_layernorm(layer.self_attn(x))
    return x + layer.post_feedforward_layernorm(layer.mlp(x))


def normed_sum(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = layer.post_attention_layernorm(x + layer.self_attn(x))
    return layer.post_feedforward_layernorm(x + layer.mlp(x))


def parallel(layer: Any, x: torch.Tensor) -> torch.Tensor:
    normed = layer.input_layernorm(x)
    return x + layer.self_attn(normed) + layer.mlp(normed)


def two_norms(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + layer.self_attn(layer.input_layernorm(x)) + layer.mlp(layer.post_attention_layernorm(x))


def shortcut(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + layer.self_attn(layer.input_layernorm(x))
    normed, second = layer.post_attention_layernorm(x), layer.second
    x = x + layer.mlp(normed)
    x = x + second.self_attn(second.input_layernorm(x))
    return x + second.mlp(second.post_attention_layernorm(x)) + layer.shortcut(normed)


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        (PreNormLayer, pre_norm),
        (SandwichLayer, sandwich),
        (PostNormLayer, post_norm),
        (NormedSumLayer, normed_sum),
        (ParallelLayer, parallel),
        (TwoNormParallelLayer, two_norms),
        (ShortcutLayer, shortcut),
    ],
    ids=lambda value: value.__name__,
)
@pytest.mark.parametrize("is_last_of_stage", [False, True])
def test_formula(kind: Any, formula: Formula, is_last_of_stage: bool) -> None:
    layer = kind(None, Settings(), LayerPlace(0, 0, cast(Any, None)), BLOCKS)
    x, next_norm = torch.randn(3, WIDTH), None if is_last_of_stage else Times()
    normed = x if layer.input_layernorm is None else layer.input_layernorm(x)
    step = STEP
    normed, total = layer(normed, x, next_norm, step)
    assert layer.self_attn.ctx is layer.mlp.ctx is step
    expected = formula(layer, x)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, expected if next_norm is None else next_norm(expected))


@pytest.mark.parametrize(
    "kind", [PreNormLayer, SandwichLayer, PostNormLayer, NormedSumLayer, ParallelLayer, TwoNormParallelLayer]
)
def test_behind_attention_for_the_tokens_that_are_read(kind: Any) -> None:
    layer = kind(None, Settings(), LayerPlace(0, 0, cast(Any, None)), BLOCKS)
    x, read = torch.randn(3, WIDTH), torch.tensor([2, 0], dtype=torch.int32)
    normed = x if layer.input_layernorm is None else layer.input_layernorm(x)
    whole = layer(normed, x, Times(), STEP)[1]
    narrow = replace(STEP, read=read, slots=torch.tensor([7, -1, 9]))
    _, total = layer(normed, x, Times(), narrow)
    assert layer.narrows
    assert layer.self_attn.ctx is narrow, "which attends from all of them"
    torch.testing.assert_close(total, whole[[2, 0]])
    behind = layer.mlp.ctx
    assert behind.read is None
    assert behind.positions.tolist() == [2, 0]
    assert behind.slot_mapping.tolist() == [9, 7]


def test_who_joins_blocks_in_a_way_of_its_own_says_whether_it_heeds_what_is_read() -> None:
    for path in FAMILY_FILES:
        importlib.import_module(path)
    waiting, silent = [DecoderLayer], []
    while waiting:
        kinds = waiting.pop().__subclasses__()
        waiting += kinds
        silent += [kind for kind in kinds if "forward" in vars(kind) and kind.narrows and "narrows" not in vars(kind)]
    assert silent == []


@pytest.mark.parametrize("is_last_of_stage", [False, True])
def test_a_layer_of_one_block(is_last_of_stage: bool) -> None:
    layer: Any = OneBlockLayer(cast(Any, None), cast(Any, Settings()), LayerPlace(0, 0, cast(Any, None)), BLOCKS)
    x, next_norm = torch.randn(3, WIDTH), None if is_last_of_stage else Times()
    normed, total = layer(layer.input_layernorm(x), x, next_norm, STEP)
    expected = x + layer.mixer(layer.input_layernorm(x))
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, expected if next_norm is None else next_norm(expected))


@pytest.mark.parametrize("is_last_of_stage", [False, True])
@pytest.mark.parametrize(("attends", "feeds"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_layer_that_lacks_a_block(attends: bool, feeds: bool, is_last_of_stage: bool) -> None:
    place, nothing = LayerPlace(0, 0, cast(Any, None)), cast(Any, None)
    layer: Any = PartialLayer(nothing, cast(Any, Settings()), place, BLOCKS, attends=attends, feeds=feeds)
    x, next_norm = torch.randn(3, WIDTH), None if is_last_of_stage else Times()
    normed = x if layer.input_layernorm is None else layer.input_layernorm(x)
    normed, total = layer(normed, x, next_norm, STEP)
    expected = x + layer.self_attn(layer.first_norm(x)) if attends else x
    expected = expected + layer.mlp(layer.post_attention_layernorm(expected)) if feeds else expected
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, expected if next_norm is None else next_norm(expected))


def test_a_layer_that_weighs_what_it_adds_to() -> None:
    ctx, place = SimpleNamespace(dtype=torch.float32), LayerPlace(0, 0, cast(Any, None))
    layer: Any = WeighedSumLayer(cast(Any, ctx), cast(Any, Settings()), place, BLOCKS)
    for weight in (layer.input_residual, layer.post_attention_residual):
        weight.data = torch.rand(WIDTH)
    x, next_norm = torch.randn(3, WIDTH), Times()
    normed, total = layer(layer.input_layernorm(x), x, next_norm, STEP)
    expected = layer.input_residual * x + layer.self_attn(layer.input_layernorm(x))
    expected = layer.post_attention_residual * expected + layer.mlp(layer.post_attention_layernorm(expected))
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, next_norm(expected))


def bare(kind: type[nn.Module]) -> Any:
    """A module of a kind, with nothing in it."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


@pytest.mark.parametrize(("attention", "mlp"), [(Attention, GatedMLP), (Attention, Block), (Block, GatedMLP)])
def test_norms_that_one_product_reads_say_so(attention: type[nn.Module], mlp: type[nn.Module]) -> None:
    def blocks(kind: type[nn.Module]) -> Any:
        return lambda *_: Block() if kind is Block else bare(kind)

    made = Blocks(norm=lambda *_: bare(RMSNorm), attention=blocks(attention), mlp=blocks(mlp))
    place = LayerPlace(0, 0, cast(Any, None))
    layer = PreNormLayer(cast(Any, None), cast(Any, Settings()), place, made)
    assert cast(RMSNorm, layer.input_layernorm).before_product == (attention is Attention)
    assert cast(RMSNorm, layer.post_attention_layernorm).before_product == (mlp is GatedMLP)
    others = SandwichLayer(cast(Any, None), cast(Any, Settings()), place, made).modules()
    assert not any(norm.before_product for norm in others if isinstance(norm, RMSNorm))
