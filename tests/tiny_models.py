"""Random tiny models in Hugging Face layout, written by transformers, for tests.

Weights are drawn wide enough for greedy answers to vary. A directory is written once per process and configuration.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

DEFAULTS: dict[str, Any] = {
    "vocab_size": 331,  # no multiple of 64
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(family: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Directory of a random model; `changes` override DEFAULTS in its configuration, but for those of `without`."""
    return _save(family, seed, dtype, json.dumps(changes, sort_keys=True))


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="manta-tiny-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def _save(family: str, seed: int, dtype: str, changes: str) -> Path:
    options = {**DEFAULTS, **json.loads(changes)}
    max_shard_size = options.pop("max_shard_size", "1GB")
    for name in options.pop("without", ()):
        del options[name]
    config = AutoConfig.for_model(family, **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms would otherwise be all 0 or all 1, and hide a mix-up.
            if parameter.ndim == 1 or "norm" in name or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):  # zeros and ones too
                buffer.add_(torch.randn_like(buffer) * 0.2)
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=_root()))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def hf_model(directory: Path) -> PreTrainedModel:
    """The same weights in transformers, fp32, plain attention; Falcon's adds ALiBi twice (5.17), so there the other."""
    has_alibi = getattr(AutoConfig.from_pretrained(directory), "alibi", False)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa" if has_alibi else "eager"
    )
    return model.eval()


def hf_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' greedy continuation, going on after the end-of-sequence token."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
