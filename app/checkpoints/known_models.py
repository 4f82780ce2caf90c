"""Well-known models by `family:size`, as Ollama's users call them, and their repositories on the Hugging Face hub.

A name means the weights that the maker published, not the quantized ones that Ollama downloads under it. Only models
that follow instructions, or give embeddings, and that run here.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOWN_MODELS: Mapping[str, Mapping[str, str]] = {
    "all-minilm": {
        "22m": "sentence-transformers/all-MiniLM-L6-v2",
        "33m": "sentence-transformers/all-MiniLM-L12-v2",
    },
    "deepseek-r1": {
        "1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
        "14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
        "32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        "70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
        "671b": "deepseek-ai/DeepSeek-R1",
    },
    "gemma2": {"2b": "google/gemma-2-2b-it", "9b": "google/gemma-2-9b-it", "27b": "google/gemma-2-27b-it"},
    "gemma3": {
        "270m": "google/gemma-3-270m-it",
        "1b": "google/gemma-3-1b-it",
        "4b": "google/gemma-3-4b-it",
        "12b": "google/gemma-3-12b-it",
        "27b": "google/gemma-3-27b-it",
    },
    "gpt-oss": {"20b": "openai/gpt-oss-20b", "120b": "openai/gpt-oss-120b"},
    "llama3.1": {
        "8b": "meta-llama/Llama-3.1-8B-Instruct",
        "70b": "meta-llama/Llama-3.1-70B-Instruct",
        "405b": "meta-llama/Llama-3.1-405B-Instruct",
    },
    "llama3.2": {"1b": "meta-llama/Llama-3.2-1B-Instruct", "3b": "meta-llama/Llama-3.2-3B-Instruct"},
    "llama3.3": {"70b": "meta-llama/Llama-3.3-70B-Instruct"},
    "mistral": {"7b": "mistralai/Mistral-7B-Instruct-v0.3"},
    "mistral-nemo": {"12b": "mistralai/Mistral-Nemo-Instruct-2407"},
    "mixtral": {"8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1", "8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1"},
    "olmo2": {"7b": "allenai/OLMo-2-1124-7B-Instruct", "13b": "allenai/OLMo-2-1124-13B-Instruct"},
    "phi4": {"14b": "microsoft/phi-4"},
    "phi4-mini": {"3.8b": "microsoft/Phi-4-mini-instruct"},
    "qwen2.5": {
        size: f"Qwen/Qwen2.5-{size.upper()}-Instruct" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")
    },
    "qwen2.5-coder": {
        size: f"Qwen/Qwen2.5-Coder-{size.upper()}-Instruct" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
    },
    "qwen3": {
        **{size: f"Qwen/Qwen3-{size.upper()}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
        "30b": "Qwen/Qwen3-30B-A3B",
        "235b": "Qwen/Qwen3-235B-A22B",
    },
    "qwen3-coder": {"30b": "Qwen/Qwen3-Coder-30B-A3B-Instruct", "480b": "Qwen/Qwen3-Coder-480B-A35B-Instruct"},
    "qwq": {"32b": "Qwen/QwQ-32B"},
    "smollm2": {
        "135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    },
}


def known_repository(name: str) -> str | None:
    """The repository of `family:size`; None of any other name."""
    family, _, size = name.lower().partition(":")
    return KNOWN_MODELS.get(family, {}).get(size)


def sizes_hint(name: str) -> str:
    """The end of an error about a name without a size, or with one that the family does not have; else empty."""
    family = name.lower().partition(":")[0]
    names = [f"{family}:{size}" for size in KNOWN_MODELS.get(family, {})]
    return f"; known: {', '.join(names)}" if names else ""
