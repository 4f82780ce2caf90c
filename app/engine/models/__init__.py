"""Models by the architecture that config.json names: one file and one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs no torch
    from app.engine.models.decoder import CausalLM

MODELS: Registry[type[CausalLM]] = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "app.engine.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "app.engine.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "app.engine.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "app.engine.models.qwen3:Qwen3ForCausalLM",
    },
)
