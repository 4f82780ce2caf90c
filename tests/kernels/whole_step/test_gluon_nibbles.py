"""Whole steps with weights of 4 bits: what the kernel means on a CPU, and what it gives on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from app.kernels.gemm.stored import StoredTiles
from app.kernels.whole_step import StepLayer, StepShape, persistent
from app.kernels.whole_step.forms import form_of
from app.kernels.whole_step.gluon_step import whole_step_kernel
from app.kernels.whole_step.persistent import PersistentStep, StepTile, tile_of
from app.kernels.whole_step.reference import whole_step
from tests.kernels.gluon_on_cpu import OnCpu
from tests.kernels.whole_step.test_persistent import (
    BLOCK,
    BLOCKS,
    CPU,
    LLAMA,
    ON_HOPPER,
    QWEN,
    assert_near,
    assert_right_every_time,
    token_at,
)

SMALL = StepShape(2048, 16, 4, 128, 2048, 1e-6, 128**-0.5, norms_heads=True)
GROUP = 128
FP16, BF, FP32 = torch.float16, torch.bfloat16, torch.float32


def layers_of(
    shape: StepShape, count: int, scales: torch.dtype, offsets: torch.dtype | None, device: torch.device = CPU
) -> list[StepLayer]:
    """All in one memory, as the kernel finds them from one address on."""
    s, generator = shape, torch.Generator(device).manual_seed(count)
    size = s.heads * s.head_dim
    weights = [(size + 2 * s.kv_heads * s.head_dim, s.hidden), (s.hidden, size), (2 * s.intermediate, s.hidden)]
    weights.append((s.hidden, s.intermediate))
    vectors = [(s.hidden,), (s.hidden,), (s.head_dim,), (s.head_dim,), (BLOCKS, 2, s.kv_heads, BLOCK, s.head_dim)]
    sides = [scales] if offsets is None else [scales, offsets]
    num_bytes = [
        n for rows, k in weights for n in (rows * k // 2, *(rows * (k // GROUP) * one.itemsize for one in sides))
    ]
    num_bytes += [2 * int(torch.Size(one).numel()) for one in vectors]
    memory = torch.empty(count * sum(num_bytes), dtype=torch.uint8, device=device).random_(generator=generator)
    layers = []
    for layer in memory.split(sum(num_bytes)):
        parts = iter(layer.split(num_bytes))
        found = [_weight(parts, rows, k, scales, offsets, generator) for rows, k in weights]
        norm, mlp_norm, query, key, cache = (next(parts).view(BF).view(one) for one in vectors)
        for one in (norm, mlp_norm, query, key, cache):
            one.normal_(generator=generator)
        heads = (query, key) if s.norms_heads else (None, None)
        layers.append(StepLayer(norm, found[0], *heads, found[1], mlp_norm, found[2], found[3], cache))
    return layers


def _weight(
    parts: Iterator[torch.Tensor], rows: int, k: int, scales: torch.dtype, offsets: torch.dtype | None,
    generator: torch.Generator,
) -> StoredTiles:  # fmt: skip
    words = next(parts).view(torch.int16).view(rows, k // 4)
    scale = next(parts).view(scales).view(k // GROUP, rows)
    scale.uniform_(0.1 * k**-0.5, 0.3 * k**-0.5, generator=generator)
    offset = None
    if offsets is not None:
        offset = next(parts).view(offsets).view(k // GROUP, rows)
        zeros = torch.randint(-7, 8, offset.shape, device=offset.device, generator=generator)
        offset.copy_(scale.float() * zeros)
    return StoredTiles("nibble", words, scale, offset, None, k, GROUP, GROUP)


@pytest.mark.parametrize(
    ("shape", "scales", "offsets", "position"),
    [
        (SMALL, FP32, None, 50),
        (replace(SMALL, norms_heads=False, kv_heads=2), FP16, FP32, 0),
        (replace(SMALL, norms_heads=False), BF, BF, 130),
    ],
)
def test_meaning(
    shape: StepShape,
    scales: torch.dtype,
    offsets: torch.dtype | None,
    position: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    layers, exact = (layers_of(shape, 1, scales, offsets) for _ in range(2))
    form = form_of([layers[0].qkv])
    assert form is not None
    tile = tile_of(shape, form, programs=16)
    assert tile is not None
    step = PersistentStep(shape, {form: tile}, CPU, 16)
    x, token = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)), token_at(position, shape)
    x = x.to(BF)
    expected = whole_step(x, exact, token, shape)
    found = step.run(x.clone(), layers, token)
    assert found is not None
    assert_near(found, expected)
    assert_near(layers[0].cache, exact[0].cache)


def test_forms() -> None:
    """All weights of a step are of one form: types, too, of what stands beside them."""
    plain, other, zeros = (layers_of(QWEN, 1, *sides)[0] for sides in ((FP32, None), (FP16, None), (FP32, FP32)))
    assert isinstance(plain.qkv, StoredTiles)
    found = [form_of([one.qkv, one.down]) for one in (plain, other, zeros)]
    assert [None if one is None else (one.name, one.sides) for one in found] == [
        ("nibble float32", 1), ("nibble float16", 1), ("nibble float32 float32", 2),
    ]  # fmt: skip
    assert form_of([plain.qkv, other.qkv]) is None
    assert form_of([plain.qkv, torch.zeros(8, 8, dtype=BF)]) is None
    for unlike in ({"form": "e2m1"}, {"group": 64, "block": 64}, {"group": 256}):
        assert form_of([replace(plain.qkv, **unlike)]) is None


def test_tiles() -> None:
    """What stands beside weights takes room of the ring; rows of a program are whole groups, or there is no tile."""
    layers = [layers_of(replace(SMALL, intermediate=128), 1, *sides)[0] for sides in ((FP16, None), (FP16, FP32))]
    found = [form_of([layer.qkv]) for layer in layers]
    tiles = [None if form is None else tile_of(LLAMA, form) for form in found]
    assert tiles == [StepTile(8, 16, 11, 16, 4, (13, 128)), StepTile(8, 16, 10, 16, 4, (13, 512))]
    assert found[0] is not None
    assert tile_of(QWEN, found[0]) is None
    assert tile_of(replace(LLAMA, intermediate=14336 - 1024), found[0]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("scales", "offsets"), [(FP16, None), (FP32, None), (FP16, FP32)])
def test_on_a_gpu(scales: torch.dtype, offsets: torch.dtype | None) -> None:
    """As its definition; the same to the bit every time, from a graph, too."""
    device = torch.device("cuda", 0)
    made, layers = persistent.make(LLAMA, device), layers_of(LLAMA, 2, scales, offsets, device)
    assert made is not None
    assert_right_every_time(made, layers, LLAMA, [token_at(position, LLAMA, device) for position in (0, 15, 367)])
