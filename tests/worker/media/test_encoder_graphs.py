"""Recordings of encoders by size, with graphs that repeat a call: which sizes have one, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.errors import ConfigError
from app.kernels.attention.encoder_groups import GroupPlan
from app.models.multimodal.base import Picture
from app.worker.media import encoder_graphs
from app.worker.media.encoder_graphs import COMMON, EncoderGraphs
from app.worker.warmup.plan import PICTURES
from tests.tiny_media import MODELS, prompt_of, tiny_media_model
from tests.worker.worker_driver import Driver, Run, greedy

ON_HOST = (
    "gemma4",
    "mistral3",
    "pixtral",
    "lighton",
    "llava_",
    "granite",
    "lfm2",
    "phi4",
)  # a part of their work is done there
CAPTURABLE = [name for name in MODELS if not name.startswith(ON_HOST)]


class Graph:
    """Repeats the call that was recorded."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay: Any = run

    def reset(self) -> None:
        self.replay = None


class FakeRecorder:
    """Records without a GPU; memory grows by a byte a recording."""

    made = 0
    bytes_each = 1

    def __init__(self, device: torch.device) -> None:
        self.taken = 0

    def record(self, run: Callable[[], None]) -> Graph:
        FakeRecorder.made += 1
        self.taken += self.bytes_each if self.taken else 1
        run()
        return Graph(run)

    def pool_bytes(self) -> int:
        return self.taken


def encoder_of(name: str) -> Any:
    parts = Driver(str(tiny_media_model(name)), max_model_len=64, num_blocks=8).worker._parts
    assert parts is not None
    return parts.model.encoder  # type: ignore[attr-defined]


def picture_of(encoder: Any, grid: tuple[int, int, int], seed: int) -> Picture:
    torch.manual_seed(seed)
    shape = (grid[1] * grid[2], 3, encoder.patch, encoder.patch)
    return Picture(torch.randint(0, 256, shape, dtype=torch.uint8), grid)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRecorder]:
    monkeypatch.setattr(encoder_graphs, "Recorder", FakeRecorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(FakeRecorder, "made", 0)
    monkeypatch.setattr(FakeRecorder, "bytes_each", 0)
    return FakeRecorder


@torch.inference_mode()
def test_a_common_size_is_recorded_and_gives_what_the_encoder_gives(fake: type[FakeRecorder]) -> None:
    encoder = encoder_of("qwen3_vl")
    graphs = EncoderGraphs(encoder, torch.device("cpu"), [16, 4])
    assert not graphs.serves((48, 3, 4, 4), (1, 6, 8)), "before the start nothing is known"
    graphs.start()
    assert fake.made == 2
    for count in range(3):
        own = picture_of(encoder, (1, 8, 8), count)
        assert graphs.serves(tuple(own.pixels.shape), own.grid)
        torch.testing.assert_close(graphs.encode(own), encoder([own]))
    kept = []
    for count in range(1, COMMON + 2):
        own = picture_of(encoder, (1, 6, 8), count)
        assert graphs.serves(tuple(own.pixels.shape), own.grid) == (count >= COMMON)
        if count >= COMMON:
            kept.append((graphs.encode(own), encoder([own])))
    assert fake.made == 3
    for found, expected in kept:  # a later replay does not change what an earlier one gave
        torch.testing.assert_close(found, expected)
    large = picture_of(encoder, (1, 8, 10), 1)
    assert not any(graphs.serves(tuple(large.pixels.shape), large.grid) for _ in range(5))
    graphs.release()
    graphs.start()
    assert fake.made == 5


@torch.inference_mode()
def test_memory_and_numbers_are_bounded(fake: type[FakeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of("qwen3_vl")
    monkeypatch.setattr(encoder_graphs, "MOST_SIZES", 3)
    graphs = EncoderGraphs(encoder, torch.device("cpu"), [16])
    graphs.start()
    sizes = [((rows * columns, 3, 4, 4), (1, rows, columns)) for rows in (2, 4) for columns in (2, 4, 6)]
    for size in sizes:
        graphs.serves(*size)
    assert len(graphs._counts) <= 3
    monkeypatch.setattr(fake, "bytes_each", 10)
    for _ in range(COMMON):
        graphs.serves(*sizes[0])
    assert graphs.encode(picture_of(encoder, sizes[0][1], 1)) is not None
    assert not any(graphs.serves(*sizes[1]) for _ in range(5)), "the memory is used up"
    assert graphs.serves(*sizes[0])


@torch.inference_mode()
def test_a_failure_leaves_ordinary_calls(fake: type[FakeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of("qwen3_vl")

    def fail(*_: Any, **__: Any) -> Graph:
        raise RuntimeError("not while a stream is captured")

    monkeypatch.setattr(fake, "record", fail)
    graphs = EncoderGraphs(encoder, torch.device("cpu"), [16])
    graphs.start()
    own = picture_of(encoder, (1, 8, 8), 1)
    assert not any(graphs.serves(tuple(own.pixels.shape), own.grid) for _ in range(5))
    with pytest.raises(ConfigError, match=r"cuda_graphs=on, but .* not while a stream is captured; use auto"):
        EncoderGraphs(encoder, torch.device("cpu"), [16], must_start=True).start()


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_grid_that_came_before_is_encoded_by_launches_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host numbers that a call sent would lie elsewhere at a replay."""
    encoder = encoder_of(name)
    assert encoder.is_capturable == (name in CAPTURABLE)
    if not encoder.is_capturable:
        return
    assert encoder.num_tokens(encoder.largest(PICTURES[0]).grid) <= PICTURES[0]
    _, ask = prompt_of(name, [(4, 6, 1)])
    (item,) = ask.items
    shown = Picture(torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(item.shape), item.grid)
    constants = encoder.constants(item.grid)
    expected = encoder([shown])

    def sent(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a call makes a tensor of numbers of the host")

    for made in ("tensor", "from_numpy", "arange", "linspace"):
        monkeypatch.setattr(torch, made, sent)
    monkeypatch.setattr(GroupPlan, "__init__", sent)  # another kernel's plan sends what this one does not
    torch.testing.assert_close(encoder([shown]), expected)
    assert encoder.constants(item.grid) is constants


def test_a_worker_replays_common_sizes(fake: type[FakeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine answers is the same, and later pictures of a size go through the recording."""
    directory = str(tiny_media_model("qwen3_vl"))
    prompts = [prompt_of("qwen3_vl", [[5, 6], (4, 6, seed), [7], (2, 4, seed), [8]]) for seed in range(1, 7)]
    runs = [Run(tokens, greedy(4), asks=(ask,)) for tokens, ask in prompts]
    expected = [run.tokens for run in Driver(directory, max_model_len=128, num_blocks=64).run(runs)]
    monkeypatch.setattr(
        "app.worker.media.media.create_graphs",
        lambda config, encoder, device, squares: EncoderGraphs(encoder, device, [16]),
    )
    driver = Driver(directory, max_model_len=128, num_blocks=64)
    assert driver.worker._parts is not None
    with torch.inference_mode():
        driver.worker._parts.features.run_largest()
    assert [
        run.tokens for run in driver.run([Run(tokens, greedy(4), asks=(ask,)) for tokens, ask in prompts])
    ] == expected
    assert fake.made == 3


@torch.inference_mode()
def test_gemma_4s_largest_picture_has_a_place_for_each_patch() -> None:
    encoder = encoder_of("gemma4")
    largest = encoder.largest(1 << 14)
    assert max(largest.grid) <= encoder.positions.shape[1]
    assert encoder([largest]).shape[1] == encoder.num_tokens(largest.grid)
