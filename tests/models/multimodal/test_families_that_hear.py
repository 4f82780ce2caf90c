"""Logits and greedy tokens of decoders that listen equal transformers', on tiny random checkpoints: sounds of several
lengths, in chunks and batches, with text around them and without."""

from __future__ import annotations

import functools
import random
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel, Qwen2AudioForConditionalGeneration
from transformers import VoxtralForConditionalGeneration as HFVoxtral

from app.models.multimodal import qwen2_audio, voxtral
from app.models.multimodal.base import MediaModel
from app.records.media import MediaAsk, MediaItem
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import core_of, request
from tests.tiny_media import TEXT
from tests.tiny_models import _root
from tests.worker.worker_driver import Driver, Run, all_logits, decode_statically, greedy

SOUND, MELS, POSITIONS = 300, 12, 32
EARS = {
    **{"num_mel_bins": MELS, "max_source_positions": POSITIONS, "d_model": 32, "encoder_layers": 2},
    **{"encoder_attention_heads": 2, "encoder_ffn_dim": 48},
}
VOXTRAL_EARS = {
    **{"num_mel_bins": MELS, "max_source_positions": POSITIONS, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "intermediate_size": 128},
}
CONFIGS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "qwen2_audio": (
        Qwen2AudioForConditionalGeneration,
        {
            "audio_token_index": SOUND,
            "audio_config": EARS,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "tie_word_embeddings": False,
        },
    ),
    "voxtral": (
        HFVoxtral,
        {
            "audio_token_id": SOUND,
            "audio_config": VOXTRAL_EARS,
            "text_config": {**TEXT, "model_type": "llama"},
            "tie_word_embeddings": False,
        },
    ),
}
CLASSES: dict[str, type[MediaModel]] = {
    "qwen2_audio": qwen2_audio.Qwen2AudioForConditionalGeneration,
    "voxtral": voxtral.VoxtralForConditionalGeneration,
}
TOKENS = 6


@functools.cache
def model_of(name: str) -> Path:
    """Directory of a random model that listens."""
    kind, options = CONFIGS[name]
    config = AutoConfig.for_model(name, **options)
    torch.manual_seed(0)
    model = kind(config)  # type: ignore[call-arg]
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if "language_model" not in own and parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            if parameter.ndim == 1 or "norm" in own:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root()))
    model.save_pretrained(directory)
    return directory


@functools.cache
def judge_of(name: str) -> PreTrainedModel:
    """The same weights in transformers."""
    model: PreTrainedModel = CONFIGS[name][0].from_pretrained(
        model_of(name), dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def sound(name: str, size: int, offset: int, seed: int) -> tuple[MediaItem, list[int]]:
    """A random sound of so many windows, or frames of one, and its tokens."""
    windows, frames = (size, 2 * POSITIONS) if name == "voxtral" else (1, size)
    shape = (windows, MELS, 2 * POSITIONS) if name == "voxtral" else (MELS, 2 * POSITIONS)
    values = np.random.default_rng(seed).normal(0, 1, shape).astype("<f4").tobytes()
    count = windows * POSITIONS * 32 // 128 if name == "voxtral" else ((frames - 1) // 2 + 1) // 2
    digest = blake2b(values + bytes([size]), digest_size=16).digest()
    return MediaItem("audio", digest, offset, count, (windows, 1, frames), shape, values), [SOUND] * count


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 299) for _ in range(count)]


PROMPTS: dict[str, list[list[Any]]] = {
    "qwen2_audio": [
        [words(5, 1), (64, 1), words(4, 2)],
        [(9, 2), words(3, 3), (33, 3), words(6, 4)],
        [words(11, 5)],
        [words(2, 6), (64, 1), words(3, 7)],
    ],
    "voxtral": [
        [words(5, 1), (1, 1), words(4, 2)],
        [(1, 2), words(3, 3), (2, 3), words(6, 4)],
        [words(11, 5)],
        [words(2, 6), (1, 1), words(3, 7)],
    ],
}


def prompt_of(name: str, parts: list[Any]) -> tuple[list[int], MediaAsk]:
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        item, own = sound(name, part[0], len(tokens), part[1])
        items.append(item)
        tokens += own
    return tokens, MediaAsk(tuple(items))


def features_of(name: str, items: tuple[MediaItem, ...]) -> dict[str, torch.Tensor]:
    if not items:
        return {}
    values = [torch.from_numpy(np.frombuffer(item.pixels, "<f4").reshape(item.shape).copy()) for item in items]
    if name == "voxtral":
        return {"input_features": torch.cat(values)}
    heard = torch.tensor([item.grid[2] for item in items])
    mask = (torch.arange(2 * POSITIONS) < heard[:, None]).long()
    return {"input_features": torch.stack(values), "feature_attention_mask": mask}


@functools.cache
def judged(name: str, index: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits [T, V] of a prompt, and its greedy continuation, each token from the whole text."""
    tokens, ask = prompt_of(name, PROMPTS[name][index])
    model, answer, seen = judge_of(name), list[int](), features_of(name, ask.items)
    first: torch.Tensor | None = None
    for _ in range(TOKENS):
        ids = torch.tensor([tokens + answer])
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **seen).logits[0]
        first = logits if first is None else first
        answer.append(int(logits[-1].argmax()))
        assert answer[-1] != SOUND
    assert first is not None
    return first, answer


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    prompts = [prompt_of(name, parts) for parts in PROMPTS[name]]
    expected = [judged(name, index) for index in range(len(prompts))]
    assert len({tuple(tokens) for _, tokens in expected}) == len(prompts)
    whole = Driver(str(model_of(name)), max_model_len=256, num_blocks=64)
    assert whole.worker._parts is not None
    assert isinstance(whole.worker._parts.model, CLASSES[name])
    for (tokens, ask), (logits, _) in zip(prompts, expected, strict=True):
        torch.testing.assert_close(all_logits(whole, tokens, ask), logits, atol=1e-3, rtol=1e-3)
    chunked = Driver(str(model_of(name)), max_model_len=256, num_blocks=64, chunk=7)
    decode_statically(chunked.worker, [1, 2, 4])
    for driver in (whole, chunked):
        runs = driver.run([Run(tokens, greedy(TOKENS), asks=(ask,)) for tokens, ask in prompts])
        assert [run.tokens for run in runs] == [tokens for _, tokens in expected]
        driver.worker.shutdown()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"num_blocks": 0, "max_num_batched_tokens": 24}])
def test_a_whole_engine_says_the_same(name: str, options: dict[str, Any]) -> None:
    few = {"num_blocks": {"voxtral": 12, "qwen2_audio": 16}[name]} if "num_blocks" in options else {}
    core, num_preemptions = core_of(str(model_of(name)), max_num_seqs=4, **{**options, **few}), 0
    for _ in range(2):
        asked = [request(i, *prompt_of(name, parts)) for i, parts in enumerate(PROMPTS[name])]
        results = run(core, asked)
        assert [results.tokens[f"r{i}"] for i in range(len(asked))] == [
            judged(name, index)[1] for index in range(len(asked))
        ]
        num_preemptions += sum(final.num_preemptions for final in results.final.values())
    assert num_preemptions or "num_blocks" not in options
    assert_idle(core)
    core.shutdown()
