"""Families that see on a GPU, through the whole engine with its graphs: tokens are transformers' on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.media import MediaAsk
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import KEY, run
from tests.models.multimodal import test_families_that_see_videos as videos
from tests.models.multimodal.test_families_that_see import CHUNKS, PROMPTS
from tests.tiny_media import MODELS, judged, prompt_of, tiny_media_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]
MAX_TOKENS = 6
REPLAYED = ("qwen", "llava", "internvl", "glm", "kimi", "paddle")
Prompt = tuple[list[int], MediaAsk]


def tokens_of(name: str, chunk: int, prompts: list[Prompt], *, one_by_one: bool = False) -> list[list[int]]:
    """What the engine answers each prompt, with its graphs."""
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": CHUNKS.get(name, chunk), "num_blocks": 128}
    config = EngineConfig(
        model=str(tiny_media_model(name)), device="cuda", dtype="float32", max_model_len=256, max_item_tokens=96,
        encoder_cache_bytes=1 << 20, **options,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    try:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=0)
        requests = [
            EngineRequest(f"r{i}", tokens, params, asks=(ask,) if ask.items else ())
            for i, (tokens, ask) in enumerate(prompts)
        ]
        found: dict[str, list[int]] = {}
        for batch in [[one] for one in requests] if one_by_one else [requests]:
            found |= run(core, batch).tokens
        return [found[f"r{i}"] for i in range(len(prompts))]
    finally:
        core.shutdown()


def answers_of(name: str, prompts: list[Prompt]) -> list[list[int]]:
    """What transformers answers each prompt."""
    return [judged(name, *prompt, MAX_TOKENS)[1] for prompt in prompts]


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, chunk: int) -> None:
    prompts = [prompt_of(name, parts) for parts in PROMPTS]
    assert tokens_of(name, chunk, prompts) == answers_of(name, prompts)


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("name", videos.NAMES)
def test_tokens_behind_videos_are_those_of_transformers(name: str, chunk: int) -> None:
    own = videos.prompt(name)
    assert tokens_of(name, chunk, [own]) == [videos.judged(name, *own, MAX_TOKENS)[1]]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(REPLAYED)])
def test_pictures_of_common_sizes_are_replayed_and_tokens_are_those_of_transformers(name: str) -> None:
    """One behind the other, so that each size comes alone, again and again."""
    prompts = [prompt_of(name, [[5, 6, 7], (6, 8, seed), [8, 9]]) for seed in range(1, 13)]
    assert tokens_of(name, 256, prompts, one_by_one=True) == answers_of(name, prompts)
