"""kv_cache_dtype=int8_per_token_head in a whole engine: against transformers with keys and values rounded from outside,
and against the engine with an unquantized cache."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.kernels.attention import KV_INT8
from app.layers.cache_spec import LayerCacheSpec
from app.worker.attention.kv_cache import KVCacheSpec, select_kv_dtype
from tests.kernels.attention.test_int8_cache import left_of
from tests.tiny_models import hf_model, tiny_model
from tests.worker.attention.test_fp8_kv import MAX_TOKENS, engine, prompts, tokens

INT8 = "int8_per_token_head"


class RoundedCache(DynamicCache):
    """transformers' cache, rounded in NumPy on the way in."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
        rounded = (left_of(states).float() for states in (key_states, value_states))
        return super().update(*rounded, layer_idx, *rest, **more)


def model() -> str:
    return str(tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32))


@functools.cache
def judged() -> list[list[int]]:
    judge, answers = hf_model(model()), []
    for prompt in prompts():
        cache, token_ids, answer = RoundedCache(config=judge.config), prompt, []
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                logits = judge(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits
            answer.append(int(logits[0, -1].argmax()))
            token_ids = answer[-1:]
        answers.append(answer)
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "num_blocks": 24, "kv_host_memory_bytes": 1 << 20},
        {"model_impl": "transformers", "num_blocks": 24},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_tokens_equal_transformers_with_a_rounded_cache(options: dict[str, Any]) -> None:
    """In chunks, from the prefix cache, from host memory, and with transformers' modules, too."""
    with engine(model(), kv_cache_dtype=INT8, **options) as llm:
        assert any("MiB, int8)" in note for note in llm.worker_info.notes)
        assert not any("scales" in note for note in llm.worker_info.notes)
        assert tokens(llm) == judged()
        assert tokens(llm) == judged()  # now partly from the cache


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_ranks_keep_their_heads_and_layers(sizes: tuple[int, int]) -> None:
    parallel = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    with engine(model(), kv_cache_dtype=INT8, executor="local_processes", **parallel) as llm:
        assert tokens(llm) == judged()


def test_blocks_hold_a_scale_for_each_token_and_head() -> None:
    spec = KVCacheSpec((LayerCacheSpec((2, 2), 64 + 4, KV_INT8),) * 3, block_size=16)
    assert spec.bytes_per_token == 3 * 2 * 2 * (64 + 4)
    assert spec.quantized_to == "int8"


def test_names_and_refusals() -> None:
    assert EngineConfig(kv_cache_dtype="int8") == EngineConfig(kv_cache_dtype=INT8)
    assert select_kv_dtype(INT8, torch.device("cpu")) == KV_INT8
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8_per_token_head: only CPUs have it") as raised:
        select_kv_dtype(INT8, torch.device("cuda"))
    assert raised.value.param == "kv_cache_dtype"
