"""Times at which a transcript's tokens were heard, judged by transformers' `_extract_token_timestamps`: over the same
tokens, whole and in chunks, beside others, with cached prefixes, and over two ranks."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from app.api.openai.audio.alignment import token_ends
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.records.alignment_ask import AlignmentAsk
from app.records.encoder_input import EncoderInput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.speech_info import SpeechInfo
from tests import limits
from tests.engine.core_driver import Results, assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.engine.test_pictures import core_of
from tests.engine.test_transcripts import RULES
from tests.tiny_sounds import noise, tiny_whisper

HEADS = [[0, 1], [1, 0], [1, 1]]
STEP_S, SEEDS = 0.02, range(4)
NUM_FRAMES = {0: 100, 1: 100, 2: 71, 3: 6}  # of the sound, of 100 that the model hears


@functools.cache
def directory() -> str:
    """A random Whisper with rules, some of whose heads follow the sound."""
    found = tiny_whisper(seed=4)
    model: Any = WhisperForConditionalGeneration.from_pretrained(found)
    for name, value in {**RULES, "alignment_heads": HEADS}.items():
        setattr(model.generation_config, name, value)
        if hasattr(model.config, name):
            setattr(model.config, name, value)
    model.config.suppress_tokens = model.config.begin_suppress_tokens = None
    model.generation_config._from_model_config = False
    model.save_pretrained(found)
    return str(found)


def info() -> SpeechInfo:
    found = SpeechInfo.of(ModelInfo.from_directory(directory()))
    assert found is not None
    return found


@functools.cache
def judged(seed: int) -> tuple[list[int], list[float]]:
    """transformers' tokens behind the prompt, and their times."""
    model = WhisperForConditionalGeneration.from_pretrained(
        directory(), dtype=torch.float32, attn_implementation="eager"
    )
    mask = torch.zeros(1, 100, dtype=torch.long)
    mask[:, : NUM_FRAMES[seed]] = 1
    options: dict[str, Any] = {"return_timestamps": True, "return_token_timestamps": True, "attention_mask": mask}
    with torch.inference_mode():
        out = model.eval().generate(
            torch.from_numpy(np.array(noise(seed).array())).unsqueeze(0), language="de", task="transcribe",
            max_new_tokens=24, do_sample=False, num_beams=1, return_dict_in_generate=True,
            force_unique_generate_call=True, **options,
        )  # fmt: skip
    begin = out["sequences"].shape[1] - (out["token_timestamps"].shape[1] - len(prompt()))
    return out["sequences"][0, begin:].tolist(), out["token_timestamps"][0, len(prompt()) :].tolist()


def prompt() -> list[int]:
    return info().prompt("de", "transcribe", timestamps=True)


def request(name: str, seed: int, given: EncoderInput | None = None) -> EngineRequest:
    tokens, _ = judged(seed)
    ask = AlignmentAsk(len(prompt()), NUM_FRAMES[seed] // 2)
    params = SamplingParams(temperature=0, max_tokens=1, seed=0)
    return EngineRequest(name, [*prompt(), *tokens[:-1]], params, asks=(given or noise(seed), ask))


def check(results: Results, name: str, seed: int) -> None:
    pooled = results.final[name].pooled
    assert pooled is not None
    tokens, times = judged(seed)
    weights = pooled.array()
    assert weights.shape == (len(tokens) - 1, NUM_FRAMES[seed] // 2)
    found = token_ends(weights, STEP_S)
    assert len(tokens) > 10
    assert [*found, found[-1]] == pytest.approx(times, abs=0.04), seed


@pytest.mark.parametrize("chunk", [128, 7])
def test_times_are_those_of_transformers(chunk: int) -> None:
    core = core_of(directory(), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=chunk, block_size=8)
    plain = EngineRequest("plain", prompt(), SamplingParams(temperature=0, max_tokens=9, seed=0), asks=(noise(0),))
    alone = run(core, [plain]).tokens["plain"]
    for number in range(2):  # the second time, blocks of all prompts are cached
        names = {f"r{number}.{seed}": seed for seed in SEEDS}
        beside = EngineRequest(f"p{number}", *(plain.prompt_token_ids, plain.work), asks=plain.asks)
        results = run(core, [beside, *(request(name, seed) for name, seed in names.items())])
        for name, seed in names.items():
            check(results, name, seed)
        assert results.tokens[f"p{number}"] == alone
        assert results.final[f"p{number}"].pooled is None
    assert_idle(core)


def test_over_two_ranks() -> None:
    config = EngineConfig(
        model=directory(), device="cpu", executor="local_processes", max_model_len=64, num_threads=1,
        step_timeout_s=limits.patience_s(), block_size=8, num_blocks=40, max_num_seqs=4, tensor_parallel_size=2,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), ForkedExecutor(config), b"a secret for tests")
    try:
        core.start()
        results = run(core, [request(f"r{seed}", seed) for seed in SEEDS])
        for seed in SEEDS:
            check(results, f"r{seed}", seed)
    finally:
        core.shutdown()


def test_heads_of_another_model_are_none(tmp_path: Path) -> None:
    """A distilled model names those of its teacher; what is asked of it then comes without an alignment."""
    own = Path(directory())
    for file in own.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    generation = json.loads((own / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "alignment_heads": [[7, 0], [0, 1]]}))
    found = SpeechInfo.of(ModelInfo.from_directory(str(tmp_path)))
    assert found is not None
    assert found.alignment_heads == ()
    core = core_of(str(tmp_path), max_model_len=64, max_num_seqs=4)
    assert run(core, [request("r", 0)]).final["r"].pooled is None
