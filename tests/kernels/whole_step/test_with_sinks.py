"""Whole steps of layers with sinks and experts in MXFP4 (Gluon), on a CPU: what the kernel means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import StoredTiles, exponent_words, pack_words
from app.kernels.moe import GLU
from app.kernels.moe.stacked import StackedExperts
from app.kernels.whole_step import StepBiases, StepExperts, StepLayer, StepShape, StepToken, with_sinks
from app.kernels.whole_step.gluon_sinks_step import sinks_step_kernel
from app.kernels.whole_step.reference import whole_step
from app.kernels.whole_step.with_sinks import StepWithSinks, serves
from tests.kernels.gluon_on_cpu import OnCpu
from tests.kernels.whole_step.test_persistent import (
    BLOCK,
    BLOCKS,
    CPU,
    ON_HOPPER,
    assert_near,
    assert_right_every_time,
    scoring,
    token_at,
)

CLAMPED = GLU(limit=7.0, alpha=1.702, up_offset=1.0)
CHOICE = StepExperts(32, 4, weighs_chosen=True, rounds_weights=True, activation=CLAMPED)
GPT_OSS = StepShape(
    2880, 64, 8, 64, 2880, 1e-5, 64**-0.5, norms_heads=False, experts=CHOICE, has_biases=True, has_sinks=True,
    has_windows=True,
)  # fmt: skip
SMALL = replace(GPT_OSS, hidden=1088, heads=16, kv_heads=2, intermediate=192, experts=replace(CHOICE, count=6))


def layers_of(shape: StepShape, num_layers: int, device: torch.device = CPU, seed: int = 0) -> list[StepLayer]:
    """All in one memory, as the kernel finds them from one address on; every second layer has a window."""
    s, experts = shape, shape.experts
    assert experts is not None
    size, count = s.heads * s.head_dim, experts.count
    rows = size + 2 * s.kv_heads * s.head_dim
    places = [-(-k // 128) for k in (s.hidden, s.intermediate)]
    sizes = [(rows, s.hidden), (s.hidden, size), (BLOCKS, 2, s.kv_heads, BLOCK, s.head_dim), (count, s.hidden)]
    sizes += [(s.hidden,), (s.hidden,), (rows,), (s.hidden,), (count,), (count, 2 * s.intermediate), (count, s.hidden)]
    sizes += [(count, 2 * s.intermediate, places[0] * 32), (count, places[0], 2 * s.intermediate, 2)]
    sizes += [(count, s.hidden, places[1] * 32), (count, places[1], s.hidden, 2), (s.heads, 2)]
    counts = [-(-int(torch.Size(one).numel()) // 64) * 64 for one in sizes]
    generator = torch.Generator(device).manual_seed(seed)
    memory = torch.randn(num_layers * sum(counts), dtype=torch.bfloat16, device=device, generator=generator)
    layers = []
    for number, part in enumerate(memory.split(sum(counts))):
        pieces = zip(part.split(counts), sizes, strict=True)
        found = [one[: int(torch.Size(shape).numel())].view(shape) for one, shape in pieces]
        for weight in found[:2]:
            weight.mul_(weight.shape[-1] ** -0.5)
        found[3].copy_(scoring(found[3][0], count))
        norm, second, *biases = found[4:11]
        gate_up = experts_of(found[11], found[12], s.hidden, generator)
        down = experts_of(found[13], found[14], s.intermediate, generator)
        sinks = found[15].view(torch.float32).view(-1).copy_(torch.randn(s.heads, device=device, generator=generator))
        seen = {"window": 128, "group": 1} if s.has_windows and number % 2 == 0 else {}
        own: dict[str, Any] = {"biases": StepBiases(*biases), "sinks": sinks, **seen}
        layers.append(StepLayer(norm, found[0], None, None, found[1], second, gate_up, down, found[2], found[3], **own))
    return layers


def experts_of(words: torch.Tensor, scales: torch.Tensor, size: int, generator: torch.Generator) -> StackedExperts:
    """Random numbers of 4 bits in this memory."""
    count, rows = words.shape[:2]
    words, scales = words.view(torch.int16), scales.view(torch.int32).view(scales.shape[:3])
    for expert in range(count):
        codes = torch.randint(0, 16, (rows, size), device=words.device, generator=generator).to(torch.uint8)
        words[expert] = pack_words(codes, "e2m1", 128)
        exact = torch.randint(-8, -5, (scales.shape[1] * 4, rows), device=words.device, generator=generator)
        made = exponent_words(2.0**exact)
        assert made is not None
        scales[expert] = made
    tiles = StoredTiles("e2m1", words, scales, None, None, size, 128, 32)
    return StackedExperts(TableWeight(tiles), (count, rows, size))


def tokens_at(position: int, shape: StepShape, device: torch.device = CPU) -> StepToken:
    """Blocks of two groups, in different orders."""
    token = token_at(position, shape, device)
    blocks = token.blocks.flip(1).contiguous()
    slot = int(blocks[0, position // BLOCK]) * BLOCK + position % BLOCK
    return replace(token, more=((torch.tensor([slot], device=device), blocks),))


@pytest.mark.parametrize(
    ("shape", "programs", "position"),
    [
        (SMALL, 16, 0),
        (SMALL, 16, 300),
        (replace(SMALL, intermediate=1088, has_windows=False), 24, 129),
    ],
)  # fmt: skip
def test_meaning(shape: StepShape, programs: int, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice over: counters are zero behind a step."""
    monkeypatch.setattr(with_sinks, "sinks_step_kernel", OnCpu(sinks_step_kernel, all_at_once=True))
    step, token = StepWithSinks(shape, CPU, programs), tokens_at(position, shape)
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact, layers = layers_of(shape, 2), layers_of(shape, 2)
    expected = whole_step(x, exact, token, shape)
    for _ in range(2):
        found = step.run(x.clone(), layers, token)
        assert found is not None
        assert_near(found, expected)
        for one, truth in zip(layers, exact, strict=True):
            assert_near(one.cache, truth.cache)


def test_what_is_served() -> None:
    """Of GPT-OSS both sizes."""
    assert serves(GPT_OSS)
    assert serves(replace(GPT_OSS, experts=replace(CHOICE, count=128)))
    assert not serves(replace(GPT_OSS, experts=replace(CHOICE, chosen=2)))
    assert not serves(replace(GPT_OSS, experts=replace(CHOICE, activation=GLU())))
    assert not serves(replace(GPT_OSS, experts=None))
    for change in ({"has_sinks": False}, {"has_biases": False}, {"head_dim": 128}, {"hidden": 2848}, {"heads": 48}):
        assert not serves(replace(GPT_OSS, **change))  # type: ignore[arg-type]
    assert not serves(replace(GPT_OSS, intermediate=4096))  # of four experts too many numbers to keep


def test_forms_that_are_not_served() -> None:
    """Tensors of other types, in places that the kernel does not find, or in more groups than two."""
    step, layers = StepWithSinks(SMALL, CPU, 16), layers_of(SMALL, 1)
    x, token = torch.zeros(1, SMALL.hidden, dtype=torch.bfloat16), tokens_at(3, SMALL)
    (layer,) = layers
    assert isinstance(layer.gate_up, StackedExperts)
    stored = layer.gate_up.packed.tiles
    assert layer.sinks is not None
    for change in (
        {"sinks": layer.sinks.double()},
        {"group": 2},
        {"qkv": layer.qkv.float()},  # type: ignore[union-attr]
        {"gate_up": replace(layer.gate_up, packed=TableWeight(replace(stored, scales=stored.scales.float())))},
    ):
        assert step.run(x, [replace(layer, **change)], token) is None  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_on_a_gpu() -> None:
    """As its definition; the same to the bit every time, from a graph, too."""
    device = torch.device("cuda", 0)
    made, layers = with_sinks.make(GPT_OSS, device), layers_of(GPT_OSS, 2, device)
    assert made is not None
    tokens = [tokens_at(position, GPT_OSS, device) for position in (0, 15, 16, 200, 367)]
    assert_right_every_time(made, layers, GPT_OSS, tokens)
