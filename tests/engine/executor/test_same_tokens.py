"""The real worker behind every executor and transport: the same engine, the same tokens; transformers is the judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.text.tokenizer import Tokenizer
from tests.tiny_encoders import hf_encoder, texts, tiny_encoder
from tests.tiny_models import hf_greedy, hf_model, tiny_model

MAX_TOKENS = 20
LENGTHS = (3, 17, 40, 9, 64, 25)
WAYS = [("in_process", "auto"), ("ray_workers", "socket"), ("ray_workers", "compiled_graph")]


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab_size, length).tolist() for length in LENGTHS]


def generate(core: EngineCore, params: SamplingParams) -> list[list[int]]:
    """All prompts at once; the last two join while the others run."""
    requests = [
        EngineRequest(f"{number}", prompt, params, choice_index=number)
        for number, prompt in enumerate(prompts(core.info.vocab_size))
    ]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = requests[4:]
    for request in requests[:4]:
        core.add_request(request)
    while core.has_work() or waiting:
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
        if waiting and len(tokens["0"]) > 3:
            core.add_request(waiting.pop())
    return [tokens[request.request_id] for request in requests]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_executors_give_the_tokens_of_transformers(device: str) -> None:
    directory = tiny_model("llama")
    model = hf_model(directory)
    info = ModelInfo.from_directory(str(directory))
    greedy = SamplingParams(temperature=0.0, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True)
    truth = [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts(info.vocab_size)]
    sampled = []
    for executor, transport in WAYS:
        options: dict[str, Any] = {"executor": executor, "step_transport": transport}
        config = EngineConfig(
            model=str(directory),
            device=device,
            dtype="float32",
            num_blocks=64,
            max_num_batched_tokens=48,
            num_threads=1,
            **options,
        )
        core = EngineCore(config, info, create_executor(config), b"a secret for tests")
        try:
            notes = core.start().notes
            assert executor == "in_process" or f"step transport: {transport} (set by step_transport)" in notes
            assert generate(core, greedy) == truth
            core.executor.park()
            sampled.append(generate(core, drawn))
        finally:
            core.shutdown()
    assert sampled[0] == sampled[1] == sampled[2]
    assert sampled[0] != truth


@pytest.mark.usefixtures("ray_cluster")
def test_embeddings_come_from_worker_actors_too() -> None:
    directory = tiny_encoder("bert")
    model, tokenizer = hf_encoder(directory), Tokenizer.from_directory(directory)
    asked = [tokenizer.encode(text) for text in texts(12)]
    options: dict[str, Any] = {"executor": "ray_workers", "step_transport": "socket", "device": "cpu", "num_threads": 1}
    config = EngineConfig(model=str(directory), max_num_batched_tokens=130, **options)
    core = EngineCore(config, ModelInfo.from_directory(str(directory)), create_executor(config), b"for tests")
    found: dict[str, Any] = {}
    try:
        core.start()
        params = PoolingParams(task="token_embed", use_activation=False)
        for number, ids in enumerate(asked):
            core.add_request(EngineRequest(str(number), ids, params))
        while core.has_work():
            found |= {output.request_id: output.pooled for output in core.step()}
    finally:
        core.shutdown()
    for number, ids in enumerate(asked):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(found[str(number)].array(), expected, atol=1e-4)
