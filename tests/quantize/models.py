"""Tiny models with a tokenizer, what is made of them, and their judges."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from app.checkpoints.model_info import ASSETS
from app.quantize.quantize import quantize
from app.quantize.settings import QuantizeSettings
from tests.tiny_models import tiny_model

SIZES = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
PROMPT = [5, 9, 200, 31, 7, 77, 900, 14]


def speaking_model(directory: Path, family: str = "llama", **changes: Any) -> Path:
    """A random bf16 model that has the built-in one's tokenizer."""
    sizes = {**SIZES, "num_key_value_heads": 2, "initializer_range": 0.1, **changes}
    shutil.copytree(tiny_model(family, dtype="bfloat16", **sizes), directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "tiny-chat" / name, directory)
    return directory


def texts_file(file: Path, count: int = 12) -> Path:
    """So many texts of different lengths."""
    lines = [{"text": f"The number {n} and " + " ".join(str(n * k) for k in range(n % 5 + 2))} for n in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def quantized(source: Path, output: Path, form: str | None, **options: Any) -> Path:
    """What `manta quantize` makes of `source`, without a report unless `options` ask for it."""
    quantize(QuantizeSettings(str(source), output, form, **{"report": False, "device": "cpu", **options}))
    return output


def judge(directory: Path) -> Any:
    """transformers in fp32, which reads a quantized checkpoint with the compressed-tensors package."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def judge_logits(directory: Path, prompt: list[int] = PROMPT) -> torch.Tensor:
    """Its logits [T, V]."""
    logits: torch.Tensor = judge(directory)(torch.tensor([prompt])).logits[0]
    return logits


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far two tensors are, relative to the second one."""
    return float((found - expected).norm() / expected.norm())
