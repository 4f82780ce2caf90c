"""Steps of encoders over static tensors, run as they would be replayed: the same vectors, whatever pads them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from app.kernels.attention.encoder import TiledPlan, naive_encoder_attention
from app.kernels.attention.triton_encoder import ROWS, list_tiles
from app.layers import encoder_attention, one_pass_attention
from app.worker.graphs.token_graphs import TILE_ROWS, TokenForward, TokenStep, token_sizes
from tests.tiny_encoders import texts, tiny_encoder
from tests.worker.pooling.pooling_driver import PoolingDriver


class NaivePlan(TiledPlan):
    """Attends text by text, as the tiles say at that time."""

    def __init__(self, tiles: torch.Tensor) -> None:
        self.tiles = tiles

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        bias: object = None,
        seen: object = None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        assert bias is seen is None
        out = torch.zeros_like(query)
        for first, length, _ in sorted({(row, length, 0) for row, length, _ in self.tiles.tolist() if length}):
            own = [x[first : first + length] for x in (query, key, value)]
            own[1:] = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in own[1:]]
            found = naive_encoder_attention(own[0], own[1], own[2], [0, length], scale, window, is_causal=is_causal)
            out[first : first + length] = found
        return out


def of_starts(starts: list[int], device: torch.device, *, is_causal: bool = False) -> NaivePlan:
    return NaivePlan(torch.from_numpy(list_tiles(starts, is_causal=is_causal)))


@pytest.mark.parametrize("family", ["bert", "roberta", "qwen3"])
def test_padded_steps_give_the_same_vectors(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decoder, too, that keeps nothing."""
    for module in (encoder_attention, one_pass_attention):
        monkeypatch.setattr(module, "plan_encoder", of_starts)
    asked, ran = texts(9), []
    options: dict[str, Any] = {"max_num_batched_tokens": 700, "enable_prefix_caching": False, "max_model_len": 120}
    with PoolingDriver(tiny_encoder(family), **options) as driver:
        executor: Any = driver.core.executor
        forward = executor._worker._parts.forward
        assert isinstance(forward, TokenForward)
        expected = driver.pool(asked)
        step = TokenStep(forward, 700, driver.config.max_num_seqs, torch.device("cpu"), NaivePlan)

        def run(size: int) -> None:
            ran.append(size)
            step.run(size)

        with torch.inference_mode():
            step.run(700)  # as before a capture
        forward.install(step, {size: partial(run, size) for size in step.sizes})
        found = [*driver.pool(asked[:1]), *driver.pool(asked[1:3]), *driver.pool(asked)]
        assert ran
        forward.release()
        count = len(ran)
        driver.pool(asked[:1])
        assert len(ran) == count
    np.testing.assert_allclose(found, [*expected[:3], *expected], atol=1e-5)


def test_sizes() -> None:
    assert TILE_ROWS == ROWS
    assert token_sizes(100) == [100]
    assert token_sizes(2000) == [256, 384, 512, 768, 1024, 1536, 2000]
    assert token_sizes(8192) == token_sizes(32768) == [*token_sizes(2048), 3072, 4096, 6144, 8192]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_replays_on_a_gpu_give_what_the_steps_give(family: str) -> None:
    asked = texts(40)
    found = []
    for graphs in ("off", "on"):
        options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "cuda_graphs": graphs}
        options |= {"max_num_batched_tokens": 4096, "enable_prefix_caching": False, "max_model_len": 120}
        with PoolingDriver(tiny_encoder(family), **options) as driver:
            assert any(note.startswith("CUDA graphs:") for note in driver.worker_info.notes)
            found.append([*driver.pool(asked[:1]), *driver.pool(asked[1:9]), *driver.pool(asked)])
    np.testing.assert_allclose(found[0], found[1], atol=2e-2)
