"""`tiny-chat-hears` before it is taught anything: its sizes, its tokens, and the files beside its weights."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tools.tiny_chat.hears import phrases

ASSETS = Path(__file__).resolve().parents[3] / "app/assets"
OWN = ASSETS / "tiny-chat-hears"
WINDOW_S = 4
FRAMES, POSITIONS, MELS, MOST_TOKENS = 100 * WINDOW_S, 50 * WINDOW_S, 80, 48
END, START, PREVIOUS, SILENCE, NO_TIMES = (
    "<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
MARKS = (END, START, PREVIOUS, SILENCE, NO_TIMES)
TIMES = [f"<|{place / 50:.2f}|>" for place in range(POSITIONS + 1)]
SIZES: dict[str, Any] = {
    **{"d_model": 128, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 256},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 256, "activation_function": "gelu"},
    **{"num_mel_bins": MELS, "max_source_positions": POSITIONS, "max_target_positions": MOST_TOKENS, "dropout": 0.0},
}


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, merged into the words that phrases consist of; marks and times behind them."""
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)  # type: ignore[attr-defined]
    rng = random.Random(0)
    own.train_from_iterator([f" {phrases.phrase(rng)}" for _ in range(4000)], trainer)
    own.add_special_tokens([*MARKS])
    own.add_tokens([*TIMES])  # as in published models, where no time is a special token
    return own


def token(name: str) -> int:
    """The number of a mark or a time."""
    found = tokenizer().token_to_id(name)
    assert found is not None
    return int(found)


def config() -> WhisperConfig:
    """config.json."""
    end, start = token(END), token(START)
    return WhisperConfig(
        vocab_size=tokenizer().get_vocab_size(), decoder_start_token_id=start, bos_token_id=end, eos_token_id=end,
        pad_token_id=end, suppress_tokens=None, begin_suppress_tokens=None, **SIZES,
    )  # fmt: skip


def build() -> WhisperForConditionalGeneration:
    """The model, with random weights."""
    torch.manual_seed(7)
    model = WhisperForConditionalGeneration(config())
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and "embed_positions" not in name:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5 if "embed" not in name else 0.05)
    return model


def write(model: WhisperForConditionalGeneration, directory: Path) -> None:
    """Weights in 16 bits, and all files of a directory that transcribes."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = model.state_dict()
    half = WhisperForConditionalGeneration(model.config)
    half.load_state_dict({name: value.cpu().float() for name, value in kept.items()})
    half.bfloat16().save_pretrained(directory)
    end, start = token(END), token(START)
    files: dict[str, dict[str, Any]] = {
        "generation_config.json": {
            **{"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end},
            **{"no_timestamps_token_id": token(NO_TIMES), "prev_sot_token_id": token(PREVIOUS)},
            **{"is_multilingual": False, "max_initial_timestamp_index": 50, "max_length": MOST_TOKENS},
        },
        "preprocessor_config.json": {
            **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": 16_000},
            **{"chunk_length": WINDOW_S, "hop_length": 160, "n_fft": 400, "nb_max_frames": FRAMES},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer().save(str(directory / "tokenizer.json"))
