"""Whole steps of one token in one launch (Gluon), on a CPU: what the kernel means, not what depends on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.kernels.gemm import int8
from app.kernels.gemm.fp8 import Fp8Weight
from app.kernels.gemm.fp8_block import Fp8BlockWeight, Fp8OnlyWeight
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.stored import StoredTiles
from app.kernels.gemm.tiled import TiledWeight
from app.kernels.kernel_table import HOPPER
from app.kernels.moe.stacked import StackedExperts
from app.kernels.whole_step import StepExperts, StepLayer, StepShape, StepToken, StepWeight, WholeStep, persistent
from app.kernels.whole_step.forms import BF16, FP8, FP8_BLOCKS, INT8, StepForm, words_of
from app.kernels.whole_step.gluon_step import whole_step_kernel
from app.kernels.whole_step.persistent import PersistentStep, StepTile, tile_of
from app.kernels.whole_step.reference import whole_step
from tests.kernels import gluon_on_cpu
from tests.kernels.gluon_on_cpu import OnCpu

LLAMA = StepShape(4096, 32, 8, 128, 14336, 1e-5, 128**-0.5, norms_heads=False)
QWEN = StepShape(1024, 16, 8, 128, 3072, 1e-6, 128**-0.5, norms_heads=True)
CHOICE = StepExperts(128, 8, weighs_chosen=True, rounds_weights=True)
EXPERTS = StepShape(2048, 32, 4, 128, 768, 1e-6, 128**-0.5, norms_heads=True, experts=CHOICE)
SMALL = StepShape(256, 2, 2, 128, 512, 1e-6, 128**-0.5, norms_heads=True)
TILE = StepTile(4, 8, 3, 4, 2, (1, 4))
CPU = torch.device("cpu")
REPLAYS = 300  # of a step on a GPU: a race that was found once came in three steps of a hundred
ON_HOPPER = torch.cuda.is_available() and HOPPER.are_met(torch.device("cuda", 0))
BLOCK, BLOCKS = 16, 24


def layers_of(shape: StepShape, num_layers: int, device: torch.device = CPU, form: StepForm = BF16) -> list[StepLayer]:
    """All in one memory, as the kernel finds them from one address on."""
    s = shape
    size = s.heads * s.head_dim
    count = () if s.experts is None else (s.experts.count,)
    sizes = [(size + 2 * s.kv_heads * s.head_dim, s.hidden), (s.hidden, size), (*count, 2 * s.intermediate, s.hidden)]
    sizes += [(*count, s.hidden, s.intermediate), (BLOCKS, 2, s.kv_heads, BLOCK, s.head_dim)]
    sizes += [(*count, s.hidden), (s.hidden,), (s.hidden,), (s.head_dim,), (s.head_dim,)]
    counts = [int(torch.Size(one).numel()) for one in sizes]
    generator = torch.Generator(device).manual_seed(num_layers)
    memory = torch.randn(num_layers * sum(counts), dtype=torch.bfloat16, device=device, generator=generator)
    layers = []
    for part in memory.split(sum(counts)):
        found = [one.view(shape) for one, shape in zip(part.split(counts), sizes, strict=True)]
        for weight in found[:4]:
            weight.mul_(weight.shape[-1] ** -0.5)
        qkv, output, gate_up, down = (stored(weight, form) for weight in found[:4])
        cache, router, norm, mlp_norm, query, key = found[4:]
        if s.experts is not None:
            router.copy_(scoring(router[0], s.experts.count))
        heads = (query, key) if s.norms_heads else (None, None)
        own = None if s.experts is None else router
        layers.append(StepLayer(norm, qkv, *heads, output, mlp_norm, gate_up, down, cache, own))
    return layers


def stored(weight: torch.Tensor, form: StepForm) -> StepWeight:
    """The weight in a form, in its own memory."""
    if form is BF16:
        return weight
    if weight.dim() == 2:
        return in_place(in_bytes(weight, form), weight)
    each = [in_bytes(one, form) for one in weight]
    words, scales = (torch.stack([getattr(one, name) for one in each]) for name in ("words", "scales"))
    tiles = in_place(replace(each[0], words=words, scales=scales), weight)
    return StackedExperts(Fp8OnlyWeight(tiles), (len(weight), *weight.shape[1:]))


def in_place(tiles: StoredTiles, weight: torch.Tensor) -> StoredTiles:
    """The same in the memory of the weight."""
    first, second = weight.view(-1).chunk(2)
    words = first.view(torch.int16).view_as(tiles.words)
    scales = second[: 2 * tiles.scales.numel()].view(torch.float32).view_as(tiles.scales)
    words.copy_(tiles.words)
    scales.copy_(tiles.scales)
    return replace(tiles, words=words, scales=scales)


def in_bytes(weight: torch.Tensor, form: StepForm) -> StoredTiles:
    """The weight in 8 bits."""
    made: TiledWeight
    if form is FP8_BLOCKS:
        rows, size = weight.shape
        blocks = weight.float().view(rows // 128, 128, size // 128, 128)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, size)
        made = Fp8BlockWeight.of(codes, scales, (128, 128))
    elif form is INT8:
        codes, scales = int8.quantize_rows(weight)
        made = Int8Weight.of(codes.to(torch.int8), scales)
    else:
        made = Fp8Weight.quantize(weight)
    return made.stored


def scoring(direction: torch.Tensor, count: int) -> torch.Tensor:
    """A router whose scores are so far apart that what rounding does to x changes no choice."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).to(direction.device)
    return (4 * order / count - 2)[:, None] * direction[None, :] * len(direction) ** -0.5


def token_at(position: int, shape: StepShape, device: torch.device = CPU) -> StepToken:
    angles = position / 1e4 ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(1, -1)
    slot = int(blocks[0, position // BLOCK]) * BLOCK + position % BLOCK
    cos, sin = (torch.cat((a, b)).to(device, torch.bfloat16).view(1, 1, -1) for a, b in _halves(angles))
    length = torch.tensor([position + 1], dtype=torch.int32, device=device)
    return StepToken(cos, sin, torch.tensor([slot], device=device), length, blocks.to(device))


def _halves(angles: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(angles.cos(), angles.cos()), (-angles.sin(), angles.sin())]


def assert_near(found: torch.Tensor, truth: torch.Tensor) -> None:
    """Norm over norm: a number that others cancel in may err by more than itself. The cache's new vectors are few."""
    error = (found.double() - truth.double()).norm() / (found - truth != 0).double().mul(truth.double()).norm()
    assert bool((error < 2e-2) | found.equal(truth)), error


@pytest.mark.parametrize(
    ("shape", "form", "tile"),
    [
        (LLAMA, BF16, StepTile(16, 8, 12, 16, 4, (1, 4))),
        (LLAMA, INT8, StepTile(16, 8, 12, 16, 4, (32, 8))),
        (LLAMA, FP8_BLOCKS, StepTile(8, 16, 12, 16, 4, (64, 8))),
        (QWEN, BF16, StepTile(16, 8, 12, 16, 16, (1, 4))),
        (QWEN, INT8, None),
        (EXPERTS, BF16, StepTile(16, 8, 12, 16, 4, (1, 4))),
        (EXPERTS, FP8_BLOCKS, StepTile(8, 16, 12, 16, 4, (16, 8))),
        (EXPERTS, INT8, None),
        (replace(EXPERTS, intermediate=1408), BF16, None),
        (replace(EXPERTS, experts=StepExperts(256, 8, weighs_chosen=True, rounds_weights=True)), BF16, None),
        (replace(EXPERTS, experts=StepExperts(128, 6, weighs_chosen=True, rounds_weights=True)), BF16, None),
        (replace(LLAMA, head_dim=64), BF16, None),
        (replace(LLAMA, hidden=3072), BF16, None),
        (replace(QWEN, hidden=2560), BF16, None),
        (replace(LLAMA, intermediate=14400), BF16, None),
        (replace(LLAMA, intermediate=65536), BF16, None),
    ],
)
def test_tile(shape: StepShape, form: StepForm, tile: StepTile | None) -> None:
    assert tile_of(shape, form) == tile


@pytest.mark.parametrize(
    ("shape", "programs", "few", "position"),
    [
        (SMALL, 8, 2, 32),
        (replace(SMALL, norms_heads=False), 8, 4, 300),
        (replace(SMALL, norms_heads=False), 8, 1, 300),
        (replace(SMALL, kv_heads=1, hidden=128, intermediate=256), 4, 2, 0),
        (replace(SMALL, heads=4), 4, 1, 367),
        (replace(SMALL, heads=8, kv_heads=1), 4, 2, 100),
        (replace(SMALL, heads=16, kv_heads=1), 4, 2, 200),
        (replace(SMALL, heads=4, head_dim=64), 8, 2, 90),
        (
            replace(SMALL, intermediate=192, experts=StepExperts(6, 4, weighs_chosen=True, rounds_weights=True)),
            8,
            2,
            32,
        ),
        (replace(SMALL, experts=StepExperts(8, 2, weighs_chosen=False, rounds_weights=False)), 8, 2, 32),
    ],
)
def test_meaning(shape: StepShape, programs: int, few: int, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice over: counters are zero behind a step. Of contexts of over 30 tokens for each of few splits the program
    that comes last puts all together."""
    monkeypatch.setattr(persistent, "_LONG_OF_FEW", 30)
    splits = programs // shape.kv_heads
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    tile = StepTile(shape.hidden // 64, 8, 3 if shape.experts is None else 6, splits, few, (1, 4))
    step = PersistentStep(shape, {BF16: tile}, CPU, programs)
    x, token = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)), token_at(position, shape)
    x = x.to(torch.bfloat16)
    exact, layers = layers_of(shape, 2), layers_of(shape, 2)
    expected = whole_step(x, exact, token, shape)
    for _ in range(2):
        found = step.run(x.clone(), layers, token)
        assert found is not None
        assert_near(found, expected)
        for one, truth in zip(layers, exact, strict=True):
            assert_near(one.cache, truth.cache)


@pytest.mark.parametrize(
    ("form", "shape", "programs", "splits", "position"),
    [
        (INT8, replace(SMALL, heads=4, kv_heads=1, hidden=512, norms_heads=False), 4, 1, 65),
        (FP8, SMALL, 8, 2, 32),
        (FP8_BLOCKS, replace(SMALL, heads=4, kv_heads=1, hidden=512, norms_heads=False), 4, 1, 65),
    ],
    ids=["int8", "e4m3", "e4m3 in blocks"],
)
def test_weights_of_8_bits(
    form: StepForm, shape: StepShape, programs: int, splits: int, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    tile = StepTile(2, 8, 3, programs // shape.kv_heads, splits, (64, 2 if form is FP8_BLOCKS else 8))
    step, token = PersistentStep(shape, {form: tile}, CPU, programs), token_at(position, shape)
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact, layers = layers_of(shape, 2, form=form), layers_of(shape, 2, form=form)
    expected, found = whole_step(x, exact, token, shape), step.run(x.clone(), layers, token)
    assert found is not None
    assert_near(found, expected)
    for one, truth in zip(layers, exact, strict=True):
        assert_near(one.cache, truth.cache)


def test_rows_of_heads_that_part_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have one group of query, key and value, or two."""
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    shape, token = replace(SMALL, heads=1, kv_heads=1), token_at(40, SMALL)
    step = PersistentStep(shape, {BF16: StepTile(2, 16, 3, 16, 2, (1, 4))}, CPU, 16)
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact, layers = layers_of(shape, 2), layers_of(shape, 2)
    expected, found = whole_step(x, exact, token, shape), step.run(x.clone(), layers, token)
    assert found is not None
    assert_near(found, expected)


@pytest.mark.parametrize("width", [128, 512])
def test_experts_of_8_bits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose rows are half of a stage, and two stages."""
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    choice = StepExperts(6, 4, weighs_chosen=True, rounds_weights=True)
    shape = replace(SMALL, intermediate=width, experts=choice)
    step = PersistentStep(shape, {FP8_BLOCKS: StepTile(2, 8, 3, 4, 2, (128, 2))}, CPU, 8)
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact, layers = layers_of(shape, 2, form=FP8_BLOCKS), layers_of(shape, 2, form=FP8_BLOCKS)
    token = token_at(32, shape)
    expected, found = whole_step(x, exact, token, shape), step.run(x.clone(), layers, token)
    assert found is not None
    assert_near(found, expected)


@pytest.mark.parametrize("form", [BF16, FP8_BLOCKS], ids=["bf16", "e4m3 in blocks"])
def test_nothing_is_copied_from_behind_a_tensor(form: StepForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be mapped there. Rows of down have less than a stage's lines."""
    copied: list[int] = []

    def bring(desc: Any, at: Sequence[Any], barrier: Any, to: Any) -> None:
        first = desc.base.data_ptr() + int(at[0]) * persistent.LINE
        copied.extend(range(first, first + desc.block_shape[0] * persistent.LINE, persistent.LINE))
        real(desc, at, barrier, to)

    copy_engine = gluon_on_cpu._HOPPERS["tma"]
    real = copy_engine.async_copy_global_to_shared
    monkeypatch.setattr(copy_engine, "async_copy_global_to_shared", bring)
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    choice = StepExperts(6, 4, weighs_chosen=True, rounds_weights=True)
    shape = replace(SMALL, intermediate=192 if form is BF16 else 128, experts=choice)
    tile = replace(TILE, stages=6) if form is BF16 else replace(TILE, lines=2, kept=(128, 2))
    layers = layers_of(shape, 1, form=form)
    x = torch.ones(1, shape.hidden, dtype=torch.bfloat16)
    assert PersistentStep(shape, {form: tile}, CPU, 8).run(x, layers, token_at(32, shape)) is not None
    tensors = [words_of(one) for one in (layers[0].qkv, layers[0].output, layers[0].gate_up, layers[0].down)]
    ends = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in (*tensors, layers[0].cache)]
    assert copied
    assert all(any(first <= line < end for first, end in ends) for line in copied)


def assert_right_every_time(
    made: WholeStep, layers: list[StepLayer], shape: StepShape, tokens: Sequence[StepToken]
) -> None:
    """A GPU's steps are as their definition, and the same to the bit from a graph."""
    device = layers[0].cache.device
    for token in tokens:
        x = torch.randn(1, shape.hidden, device=device).to(torch.bfloat16)
        exact = [replace(layer, cache=layer.cache.clone()) for layer in layers]
        expected = whole_step(x, exact, token, shape)
        given = x.clone()
        found = made.run(given, layers, token)
        assert found is not None
        assert_near(found, expected)
        for one, truth in zip(layers, exact, strict=True):
            assert_near(one.cache, truth.cache)
        first, graph = found.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made.run(given, layers, token)
        for _ in range(REPLAYS):
            given.copy_(x)
            graph.replay()
            assert torch.equal(given, first)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        (LLAMA, BF16),
        (QWEN, BF16),
        (LLAMA, INT8),
        (LLAMA, FP8),
        (LLAMA, FP8_BLOCKS),
        (EXPERTS, BF16),
        (EXPERTS, FP8_BLOCKS),
    ],
    ids=lambda one: f"{one.hidden}" if isinstance(one, StepShape) else one.name,
)
@pytest.mark.parametrize("long_of_few", [256, 16], ids=["few splits", "many splits"])
def test_on_a_gpu(shape: StepShape, form: StepForm, long_of_few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its definition; the same to the bit every time, from a graph, too."""
    monkeypatch.setattr(persistent, "_LONG_OF_FEW", long_of_few)
    device = torch.device("cuda", 0)
    made, layers = persistent.make(shape, device), layers_of(shape, 2, device, form)
    assert made is not None
    tokens = [token_at(position, shape, device) for position in (0, 15, 16, 200, 367)]
    assert_right_every_time(made, layers, shape, tokens)


def test_no_slot_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    step, layers = PersistentStep(SMALL, {BF16: TILE}, CPU, 8), layers_of(SMALL, 1)
    before = layers[0].cache.clone()
    token = replace(token_at(20, SMALL), slot=torch.tensor([-1]))
    assert step.run(torch.ones(1, SMALL.hidden, dtype=torch.bfloat16), layers, token) is not None
    assert torch.equal(layers[0].cache, before)


def test_what_a_former_owner_left_is_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that computed NaN may have had the block: two tokens come at once, of which one is not written yet."""
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    shape, position = SMALL, 21
    step, layers = PersistentStep(shape, {BF16: TILE}, CPU, 8), layers_of(shape, 1)
    token, x = token_at(position, shape), torch.ones(1, shape.hidden, dtype=torch.bfloat16)
    layers[0].cache[token.blocks[0, position // BLOCK], :, :, position % BLOCK :] = float("nan")
    exact = [replace(layers[0], cache=layers[0].cache.clone())]
    found = step.run(x.clone(), layers, token)
    assert found is not None
    assert_near(found, whole_step(x, exact, token, shape))


def test_a_cache_that_has_more_blocks_at_its_place_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "whole_step_kernel", OnCpu(whole_step_kernel, all_at_once=True))
    step, layers = PersistentStep(SMALL, {BF16: TILE}, CPU, 8), layers_of(SMALL, 1)
    token, x = token_at(3, SMALL), torch.ones(1, SMALL.hidden, dtype=torch.bfloat16)
    whole = layers[0].cache  # behind all else that is copied
    for cache in (whole[:1], whole):
        exact = [replace(layers[0], cache=cache.clone())]
        given = replace(token, blocks=token.blocks % len(cache), slot=token.slot % (len(cache) * BLOCK))
        found = step.run(x.clone(), [replace(layers[0], cache=cache)], given)
        assert found is not None
        assert_near(found, whole_step(x, exact, given, SMALL))


def test_refuses_what_it_does_not_read() -> None:
    layers, token = layers_of(SMALL, 1), token_at(3, SMALL)
    turned = replace(layers[0], output=layers[0].output.t())
    wide = replace(layers[0], gate_up=layers[0].qkv)
    for given, dtype in ((layers[0], torch.float32), (turned, torch.bfloat16), (wide, torch.bfloat16)):
        step = PersistentStep(SMALL, {BF16: TILE}, CPU, 8)
        assert step.run(torch.ones(1, SMALL.hidden, dtype=dtype), [given], token) is None
