"""Tiny models whose steps `deterministic` makes exact: name -> what makes the directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.models.families.test_families import VARIANTS
from tests.tiny_models import tiny_model

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Those that the ways to run a request are compared with. Sizes that are no multiples of a vector's, three query heads
# to a KV head, windows that end within a block of keys, and one model whose weights are large enough to be packed.
MODELS: Mapping[str, Callable[[], Path | str]] = {
    "llama": lambda: tiny_model("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2, mlp_bias=True),
    "mistral": lambda: tiny_model("mistral", sliding_window=45, hidden_act="gelu_pytorch_tanh"),
    "qwen2": lambda: tiny_model("qwen2", num_attention_heads=4, num_key_value_heads=4, intermediate_size=99),
    "qwen3": lambda: tiny_model("qwen3", num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
    "mixtral": lambda: tiny_model("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": lambda: tiny_model("qwen3_moe", num_experts=6, norm_topk_prob=True, **EXPERTS),
    "tiny-chat": lambda: "tiny-chat",
}
_NAMES = (
    *("gemma", "gemma2", "gemma3", "phi", "phi-qk-norm", "phi3", "phi4-mini", "gpt2", "gpt2-relu", "gptj", "stablelm"),
    *("stablelm-parallel", "stablelm-qk-norm", "cohere", "cohere-plus", "cohere2", "olmo2", "olmo3", "granite", "glm"),
    *("glm4", "exaone4", "ernie4_5", "hunyuan_v1_dense", "smollm3-windows", "ministral", "ministral3"),
    *(
        "qwen2_moe",
        "qwen2_moe-sparse",
        "olmoe",
        "granitemoe",
        "granitemoeshared",
        "glm4_moe",
        "llama4",
        "llama4-sparse",
    ),
    *("dots1-windows", "exaone_moe-windows", "ernie4_5_moe-some", "hy_v3-biases", "flex_olmo-grouped"),
    *("minimax_m2-half", "hunyuan_v1_moe", "gpt_neox", "gpt_neox-serial", "opt", "opt-no-final-norm", "opt-350m"),
    *("falcon", "falcon-plain-heads", "falcon-new", "gpt_neo", "gpt_neo-local", "biogpt", "xglm", "codegen", "dbrx"),
    *("jetmoe",),
)


def _longer(changes: Mapping[str, Any]) -> dict[str, Any]:
    """A context for the prompts of the tests here, where it is bounded."""
    return {**changes, "max_position_embeddings": 512} if "max_position_embeddings" in changes else dict(changes)


_VARIANTS = {**VARIANTS, **EXPERT_VARIANTS}
# The other families, as their own tests have them.
FAMILIES: Mapping[str, Callable[[], Path | str]] = {
    name: partial(tiny_model, _VARIANTS[name][0], **_longer(_VARIANTS[name][1])) for name in _NAMES
}
EXACT_MODELS = {**MODELS, **FAMILIES}
