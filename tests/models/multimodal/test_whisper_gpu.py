"""Models with an encoder's output, and decoders that listen, on a GPU through the whole engine with its graphs: tokens
are transformers' on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from tests import tiny_hearing as hear
from tests.engine import test_pictures
from tests.engine.core_driver import KEY, run
from tests.engine.test_sounds import ASKED, answers, request
from tests.tiny_sounds import noise, tiny_whisper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]


def core_of(model: str, **options: Any) -> EngineCore:
    config = EngineConfig(model=model, device="cuda", dtype="float32", max_num_seqs=4, num_blocks=64, **options)
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    return core


@pytest.mark.parametrize("chunk", [7, 256])
def test_whisper(chunk: int) -> None:
    core = core_of(str(tiny_whisper()), max_model_len=64, max_num_batched_tokens=chunk)
    try:
        for _ in range(2):
            found = run(core, [request(i, noise(seed), prompt) for i, (seed, prompt) in enumerate(ASKED)]).tokens
            assert [found[f"r{i}"] for i in range(len(ASKED))] == answers()
    finally:
        core.shutdown()


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("name", hear.HEARING)
def test_decoders_that_listen(name: str, chunk: int) -> None:
    least = 22 if name == "gemma4-whole" else 0  # four requests and a sound or picture, which one step computes
    core = core_of(str(hear.hearing_model(name)), max_model_len=256, max_num_batched_tokens=max(chunk, least))
    try:
        asked = [
            test_pictures.request(i, *hear.prompt_of(name, parts)) for i, parts in enumerate(hear.prompts_of(name))
        ]
        found = run(core, asked).tokens
        assert [found[f"r{i}"] for i in range(len(asked))] == [hear.judged(name, i)[1] for i in range(len(asked))]
    finally:
        core.shutdown()
