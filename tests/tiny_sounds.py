"""Random tiny models that read sounds, in Hugging Face layout, sounds for them, and transformers' answers."""

from __future__ import annotations

import functools
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from app.records.encoder_input import EncoderInput
from tests.tiny_models import _root

RATE = 16_000
WHISPER: dict[str, Any] = {
    **{"vocab_size": 331, "d_model": 64, "num_mel_bins": 20, "max_source_positions": 50, "max_target_positions": 64},
    **{"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 112},
    **{"init_std": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 3},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},
}


@functools.cache
def tiny_whisper(seed: int = 0, num_mels: int = 20, num_positions: int = 50) -> Path:
    """Directory of a random Whisper."""
    config = WhisperConfig(**{**WHISPER, "num_mel_bins": num_mels, "max_source_positions": num_positions})
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms would otherwise be all 0 or all 1, and hide a mix-up.
            if parameter.ndim == 1 or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    directory = Path(tempfile.mkdtemp(prefix="whisper-", dir=_root()))
    model.save_pretrained(directory)
    return directory


@functools.cache
def whisper_judge(directory: Path) -> PreTrainedModel:
    """The same weights in transformers."""
    model: PreTrainedModel = WhisperForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def clip(seconds: float, seed: int) -> NDArray[np.float32]:
    """Tones that come and go, in noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * rng.uniform(80, 4000) * times + rng.uniform(0, 6)) for _ in range(4)]
    gates = [np.sin(2 * np.pi * rng.uniform(0.2, 3) * times) > 0 for _ in tones]
    made = sum(tone * gate for tone, gate in zip(tones, gates, strict=True)) / 8 + rng.normal(0, 0.01, len(times))
    return np.asarray(made, np.float32)


def sound_input(features: NDArray[np.float32]) -> EncoderInput:
    """Features [mels, frames] as a request brings them."""
    values = np.ascontiguousarray(features, "<f4").tobytes()
    digest = blake2b(values, digest_size=16).digest()
    return EncoderInput("audio", digest, features.shape[1] // 2, features.shape, values)


def noise(seed: int, num_mels: int = 20, num_positions: int = 50) -> EncoderInput:
    """Random features."""
    return sound_input(np.random.default_rng(seed).normal(0, 1, (num_mels, 2 * num_positions)).astype(np.float32))


def heard(samples: NDArray[np.float32], num_mels: int = 80) -> EncoderInput:
    """What transformers' extractor makes of a clip: features of its first 30 seconds."""
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    return sound_input(extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0])


def judged(directory: Path, given: EncoderInput, prompt: list[int], max_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits [T, V] of the prompt, and its greedy continuation, each token from the whole text."""
    model, answer = whisper_judge(directory), list[int]()
    features = torch.from_numpy(np.array(given.array())).unsqueeze(0)
    first: torch.Tensor | None = None
    with torch.inference_mode():
        encoded = model.get_encoder()(features)
        for _ in range(max_tokens):
            ids = torch.tensor([prompt + answer])
            logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits[0]
            first = logits if first is None else first
            answer.append(int(logits[-1].argmax()))
    assert first is not None
    return first, answer
