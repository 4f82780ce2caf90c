"""Whole steps of one token through latents and experts in one launch (Gluon), on a CPU: what the kernel means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from app.kernels.kernel_table import HOPPER
from app.kernels.whole_step import StepToken, persistent_latents
from app.kernels.whole_step.gluon_latent_step import latent_step_kernel
from app.kernels.whole_step.latents import LatentLayer, LatentShape
from app.kernels.whole_step.persistent_latents import LatentTile, PersistentLatents, serves
from app.kernels.whole_step.reference_latents import latent_step
from tests.kernels.gluon_on_cpu import OnCpu
from tests.kernels.whole_step.test_persistent import CPU, REPLAYS, assert_near, scoring

V2_LITE = LatentShape(2048, 16, 128, 64, 128, 512, 1e-6, 1e-6, 192**-0.5, 1408, 64, 6, 2)
SMALL = LatentShape(256, 2, 128, 64, 128, 256, 1e-6, 1e-6, 192**-0.5, 320, 6, 3, 1)
TILE, PROGRAMS = LatentTile(lines=4, group=32, stages=4, ahead=2, splits=2), 8
BLOCK, BLOCKS = 16, 64
ON_HOPPER = torch.cuda.is_available() and HOPPER.are_met(torch.device("cuda", 0))


def sizes_of_latents(shape: LatentShape, num_blocks: int = BLOCKS) -> list[tuple[int, ...]]:
    """Of a layer's tensors, as `layer_of_latents` takes them: all begin at a line of 128 bytes."""
    s = shape
    width, count = s.rank + s.rope, s.experts + s.shared
    sizes: list[tuple[int, ...]] = [(s.heads * (s.nope + s.rope) + width, s.hidden)]
    sizes += [(s.heads, s.nope + s.value, s.rank), (s.hidden, s.heads * s.value)]
    sizes += [(count, 2 * s.intermediate, s.hidden), (count, s.hidden, s.intermediate)]
    return [*sizes, (num_blocks, BLOCK, width), (s.experts, s.hidden), (s.hidden,), (s.hidden,), (s.rank,)]


def layer_of_latents(tensors: Sequence[torch.Tensor]) -> LatentLayer:
    inputs, up, output, gate_up, down, cache, router, norm, mlp_norm, latent_norm = tensors
    return LatentLayer(norm, inputs, latent_norm, up, output, mlp_norm, router, gate_up, down, cache)


def layers_of(shape: LatentShape, num_layers: int, device: torch.device = CPU) -> list[LatentLayer]:
    """All in one memory, as the kernel finds them from one address on."""
    sizes = sizes_of_latents(shape)
    counts = [math.prod(one) for one in sizes]
    generator = torch.Generator(device).manual_seed(num_layers)
    memory = torch.randn(num_layers * sum(counts), dtype=torch.bfloat16, device=device, generator=generator)
    layers = []
    for part in memory.split(sum(counts)):
        found = [one.view(size) for one, size in zip(part.split(counts), sizes, strict=True)]
        for weight in found[:5]:
            weight.mul_(weight.shape[-1] ** -0.5)
        layers.append(layer_of_latents(found))
        layers[-1].router.copy_(scoring(layers[-1].router[0], shape.experts))
    return layers


def token_at(position: int, shape: LatentShape, device: torch.device = CPU) -> StepToken:
    angles = position / 1e4 ** (torch.arange(0, shape.rope, 2) / shape.rope)
    blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(1, -1)
    slot = int(blocks[0, position // BLOCK]) * BLOCK + position % BLOCK
    cos = torch.cat((angles.cos(), angles.cos())).to(device, torch.bfloat16).view(1, -1)
    sin = torch.cat((-angles.sin(), angles.sin())).to(device, torch.bfloat16).view(1, -1)
    length = torch.tensor([position + 1], dtype=torch.int32, device=device)
    return StepToken(cos, sin, torch.tensor([slot], device=device), length, blocks.to(device))


def copies(layers: Sequence[LatentLayer]) -> list[LatentLayer]:
    """The same weights, with caches of their own."""
    return [replace(layer, cache=layer.cache.clone()) for layer in layers]


def assert_step(step: PersistentLatents, layers: list[LatentLayer], token: StepToken, shape: LatentShape) -> None:
    """It gives what the definition does, and its caches are the same."""
    exact = copies(layers)
    x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected, found = latent_step(x, exact, token, shape), step.run(x.clone(), layers, token)
    assert found is not None
    assert_near(found, expected)
    for one, truth in zip(layers, exact, strict=True):
        assert_near(one.cache.nan_to_num(), truth.cache.nan_to_num())


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_latents, "latent_step_kernel", OnCpu(latent_step_kernel, all_at_once=True))


@pytest.mark.parametrize(
    ("shape", "is_served"),
    [
        (V2_LITE, True),
        (replace(V2_LITE, heads=128), False),
        (replace(V2_LITE, hidden=5120), False),
        (replace(V2_LITE, rank=256), False),
        (replace(V2_LITE, intermediate=1536), True),
        (replace(V2_LITE, intermediate=1440), False),
        (replace(V2_LITE, experts=160), False),
        (replace(V2_LITE, shared=1), False),
        (replace(V2_LITE, rope=32), False),
    ],
)
def test_shapes(shape: LatentShape, is_served: bool) -> None:
    assert serves(shape) is is_served


@pytest.mark.parametrize(
    ("shape", "position"),
    [(SMALL, 0), (SMALL, 40), (replace(SMALL, intermediate=192, chosen=2, shared=2), 130), (SMALL, 400)],
)
@pytest.mark.usefixtures("on_cpu")
def test_meaning(shape: LatentShape, position: int) -> None:
    """Twice over: counters are zero behind a step."""
    assert serves(shape, TILE, PROGRAMS)
    step, layers = PersistentLatents(shape, CPU, TILE, PROGRAMS), layers_of(shape, 2)
    for _ in range(2):
        assert_step(step, layers, token_at(position, shape), shape)


@pytest.mark.usefixtures("on_cpu")
def test_experts_of_scores_that_fp32_tells_apart() -> None:
    """Of two that are the same in bf16 the higher one is chosen, of equal ones the one with the lower number."""
    step, layers = PersistentLatents(SMALL, CPU, TILE, PROGRAMS), layers_of(SMALL, 1)
    router = torch.zeros(SMALL.experts, SMALL.hidden)
    router[:, 0] = torch.tensor([1.0, 2.0, 2.0, 3.0, 2.0, 0.0])
    router[4, 1] = 2**-9
    layers[0].router.copy_(router)
    layers[0].mlp_norm.fill_(1)
    layers[0].output.zero_()
    x, token = torch.ones(1, SMALL.hidden, dtype=torch.bfloat16), token_at(3, SMALL)
    assert_near(step.run(x.clone(), layers, token), latent_step(x, copies(layers), token, SMALL))
    assert step._choices.view(PROGRAMS, -1)[0, 0] == 1  # of the shared one
    scores = torch.tensor([3.0, 2 + 2**-9, 2.0]) - torch.tensor([1.0, 2.0, 2.0, 3.0, 2 + 2**-9, 0.0]).logsumexp(0)
    assert torch.allclose(step._choices.view(PROGRAMS, -1)[0, 1:], scores.exp(), rtol=1e-4)


@pytest.mark.usefixtures("on_cpu")
def test_no_slot_is_written() -> None:
    step, layers = PersistentLatents(SMALL, CPU, TILE, PROGRAMS), layers_of(SMALL, 1)
    before = layers[0].cache.clone()
    token = replace(token_at(20, SMALL), slot=torch.tensor([-1]))
    step.run(torch.ones(1, SMALL.hidden, dtype=torch.bfloat16), layers, token)
    assert torch.equal(layers[0].cache, before)


@pytest.mark.parametrize("position", [5, 21])
@pytest.mark.usefixtures("on_cpu")
def test_what_a_former_owner_left_is_unseen(position: int) -> None:
    """A request that computed NaN may have had the block."""
    step, layers, token = PersistentLatents(SMALL, CPU, TILE, PROGRAMS), layers_of(SMALL, 1), token_at(position, SMALL)
    layers[0].cache[token.blocks[0, position // BLOCK], position % BLOCK :] = float("nan")
    assert_step(step, layers, token, SMALL)


@pytest.mark.usefixtures("on_cpu")
def test_the_last_token_of_the_memory_is_read_whole() -> None:
    """The cache lies behind all that is copied, and the copy engine's rows end in the midst of a token."""
    layers, token = layers_of(SMALL, 1), token_at(40, SMALL)
    cache, weights = layers[0].cache, layers[0].inputs
    assert (cache.data_ptr() - weights.data_ptr()) // 2 % cache.shape[2]
    blocks = token.blocks.clone()
    blocks[blocks == BLOCKS - 1], blocks[0, 0] = int(blocks[0, 0]), BLOCKS - 1
    last = cache[-1, -1].clone()
    cache.zero_()
    cache[-1, -1] = -4 * last  # all that there is to read, and heads look at it
    assert_step(PersistentLatents(SMALL, CPU, TILE, PROGRAMS), layers, replace(token, blocks=blocks), SMALL)


def test_refuses_what_it_does_not_read() -> None:
    layers, x = layers_of(SMALL, 1), torch.ones(1, SMALL.hidden, dtype=torch.bfloat16)
    assert PersistentLatents(SMALL, CPU, TILE, PROGRAMS).serves(x, layers)
    assert not PersistentLatents(SMALL, CPU, TILE, PROGRAMS).serves(x.float(), layers)
    turned, other = layers[0].output.t(), layers[0].router.float()
    small = torch.zeros(BLOCKS * 2, BLOCK // 2, layers[0].cache.shape[2], dtype=torch.bfloat16)
    for change in ({"output": turned}, {"router": other}, {"gate_up": layers[0].down}, {"cache": small}):
        step = PersistentLatents(SMALL, CPU, TILE, PROGRAMS)
        assert not step.serves(x, [replace(layers[0], **change)])  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_on_a_gpu() -> None:
    """As its definition, with what a former owner left behind the new token; the same to the bit from a graph."""
    device = torch.device("cuda", 0)
    step, layers = persistent_latents.make(V2_LITE, device), layers_of(V2_LITE, 2, device)
    assert step is not None
    for position in (0, 5, 15, 16, 63, 64, 200, 900, 1023):
        token, x = token_at(position, V2_LITE, device), torch.randn(1, V2_LITE.hidden, device=device).to(torch.bfloat16)
        for layer in layers:
            layer.cache.copy_(torch.randn_like(layer.cache))
            layer.cache[token.blocks[0, position // BLOCK], position % BLOCK :] = float("nan")
        exact, given = copies(layers), x.clone()
        expected = latent_step(x, exact, token, V2_LITE)
        first = step.run(given, layers, token).clone()
        assert_near(first, expected)
        for one, truth in zip(layers, exact, strict=True):
            assert_near(one.cache.nan_to_num(), truth.cache.nan_to_num())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run(given, layers, token)
        for _ in range(REPLAYS):
            given.copy_(x)
            graph.replay()
            assert torch.equal(given, first)
