"""Adapters on disk, written by hand or by PEFT, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny_models import hf_model

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
QUERY = "model.layers.0.self_attn.q_proj"


def pair(module: str = QUERY, rank: int = 4, size_in: int = 64, size_out: int = 64) -> dict[str, torch.Tensor]:
    """The two matrices of one module, as PEFT calls them."""
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, size_in),
        f"{name}.lora_B.weight": torch.randn(size_out, rank),
    }


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(pair() if tensors is None else tensors, directory / "adapter_model.safetensors")
    return directory


def peft_adapter(
    model: Path, directory: Path, seed: int = 0, scale: float = 0.3, base: Any = None, **config: Any
) -> Path:
    """A random adapter of a model in `model`, or of this one, saved by PEFT: all that it would train is random."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(hf_model(model) if base is None else base, LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                own = torch.randn_like(parameter) * scale
                parameter.copy_(own.abs() + 1.0 if "magnitude" in name else own)
    adapted.save_pretrained(directory)
    return directory


def peft_logits(model: Path, adapter: Path, prompt: list[int]) -> torch.Tensor:
    """fp32 logits [T, V] of the base model with an adapter, by PEFT."""
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(hf_model(model), adapter).eval()
    with torch.inference_mode():
        logits: torch.Tensor = adapted(torch.tensor([prompt])).logits[0]
    return logits
