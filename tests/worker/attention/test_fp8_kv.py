"""kv_cache_dtype=fp8 in a whole engine: against transformers with keys and values rounded from outside, and against
the engine with an unquantized cache (what e4m3 costs)."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.kernels.attention import KV_FP8
from app.layers.cache_spec import LayerCacheSpec
from app.worker.attention.kv_cache import KVCacheSpec, select_kv_dtype
from tests.kernels.gemm.test_fp8 import nearest_e4m3
from tests.tiny_encoders import tiny_encoder
from tests.tiny_models import hf_greedy, hf_model, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY_CHAT = str(ASSETS / "tiny-chat")
MAX_TOKENS = 10
# Scales of the two layers. The first clamps what is beyond 448 * 0.004 = 1.8, the second rounds finely.
SCALES = [torch.tensor([[0.004, 0.02], [0.0023, 0.011]]), torch.tensor([[0.05, 0.05], [0.07, 0.07]])]


class RoundedCache(DynamicCache):
    """transformers' cache, rounded in NumPy on the way in; `scales` [2, Hkv] of each layer."""

    def __init__(self, config: Any, scales: list[torch.Tensor]) -> None:
        super().__init__(config=config)
        self.scales = scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
        rounded = []
        for states, scales in zip((key_states, value_states), self.scales[layer_idx], strict=True):
            scale = scales[:, None, None]  # states are [1, Hkv, T, D]
            rounded.append(torch.from_numpy(nearest_e4m3((states / scale).double().numpy())).float() * scale)
        return super().update(*rounded, layer_idx, *rest, **more)


@functools.cache
def scaled_model(family: str) -> Path:
    """A random model whose checkpoint holds SCALES: one for each head in the first layer, one for all in the second."""
    plain = tiny_model(family, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    directory = Path(shutil.copytree(plain, plain.with_name(f"{plain.name}-scaled")))
    tensors = load_file(directory / "model.safetensors")
    for name, row in (("k", 0), ("v", 1)):
        tensors[f"model.layers.0.self_attn.{name}_scale"] = SCALES[0][row].view(2, 1, 1).clone()
        tensors[f"model.layers.1.self_attn.{name}_proj.{name}_scale"] = SCALES[1][row, 0].clone()
    save_file(tensors, directory / "model.safetensors")
    return directory


@functools.cache
def prompts() -> list[list[int]]:
    """Half of them share a prefix."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 331) for _ in range(40)]
    ends = [[rng.randrange(3, 331) for _ in range(1 + 9 * i)] for i in range(8)]
    return [shared + end if i % 2 else end for i, end in enumerate(ends)]


@functools.cache
def judged(family: str, *, rounded: bool = True) -> list[list[int]]:
    model = hf_model(scaled_model(family))
    if not rounded:
        return [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts()]
    answers = []
    for prompt in prompts():
        cache, token_ids, answer = RoundedCache(model.config, SCALES), prompt, []
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits
            answer.append(int(logits[0, -1].argmax()))
            token_ids = answer[-1:]
        answers.append(answer)
    return answers


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def engine(directory: str, **options: Any) -> LLM:
    common = {"tokenizer": TINY_CHAT, "device": "cpu", "num_threads": 1, "max_num_seqs": 8, "block_size": 8}
    return LLM(directory, **{**common, **options})


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_tokens_equal_transformers_with_a_rounded_cache(family: str) -> None:
    with engine(str(scaled_model(family)), kv_cache_dtype="fp8") as llm:
        assert any("MiB, fp8)" in note for note in llm.worker_info.notes)
        assert "KV cache scales: from the checkpoint, in 2 of 2 layers" in llm.worker_info.notes
        assert tokens(llm) == judged(family)
    assert judged(family) != judged(family, rounded=False), "the rounding should show"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False, "max_inflight_steps": 1, "max_num_seqs": 1},
        {"num_blocks": 24, "kv_host_memory_bytes": 1 << 20},
        {"num_blocks": 24},
    ],
    ids=lambda options: ",".join(options),
)
def test_chunks_prefix_hits_and_the_host_tier_change_nothing(options: dict[str, Any]) -> None:
    with engine(str(scaled_model("llama")), kv_cache_dtype="fp8_e4m3", **options) as llm:
        assert tokens(llm) == judged("llama")
        assert tokens(llm) == judged("llama")  # now partly from the cache


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 2)], ids=str)
def test_ranks_take_the_scales_of_their_heads_and_layers(sizes: tuple[int, int]) -> None:
    """Two KV heads in two layers: a head a rank, each head held by two ranks, a layer a stage."""
    parallel = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    with engine(str(scaled_model("llama")), kv_cache_dtype="fp8", executor="local_processes", **parallel) as llm:
        assert tokens(llm) == judged("llama")


@pytest.mark.gpu
def test_on_the_gpu_graphs_and_ordinary_steps_agree() -> None:
    """Triton kernels in fp32. A key or value between two numbers of e4m3 may fall to either side."""
    found = []
    for graphs in ("on", "off"):
        options = {"device": "cuda", "dtype": "float32", "gpu_memory_utilization": 0.2, "block_size": 16}
        with engine(str(scaled_model("llama")), kv_cache_dtype="fp8", cuda_graphs=graphs, **options) as llm:
            found.append(tokens(llm))
            assert tokens(llm) == found[-1]  # now partly from the cache
    assert found[0] == found[1]
    same = [ours == theirs for ours, theirs in zip(found[0], judged("llama"), strict=True)]
    assert sum(same) >= len(same) - 1


def test_scales_are_left_alone_without_a_quantized_cache() -> None:
    with engine(str(scaled_model("llama"))) as llm:
        assert tokens(llm) == judged("llama", rounded=False)
        assert not any("scales" in note for note in llm.worker_info.notes)


def test_what_the_built_in_model_loses() -> None:
    """Held-out conversations read without calibration: in fp8 the most likely next token is the same in 99 of 100
    places, a token's logprob changes by 0.007 on average (measured over 8,027 tokens; the bounds leave room)."""
    lines = (ASSETS / "tiny-chat" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[::40]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    best, logprobs = [], []
    for kind in ("auto", "fp8", "int8"):
        with LLM("tiny-chat", device="cpu", num_threads=1, kv_cache_dtype=kind) as llm:
            rendered = []
            for row in map(json.loads, lines):
                messages = [*row["messages"], {"role": "assistant", "content": row["expected"]}]
                rendered.append(llm.render_chat(messages, add_generation_prompt=False)[1])
            outputs = llm.generate(rendered, params, use_tqdm=False)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry is not None]
        best.append(torch.tensor([entry.token_ids[1] for entry in entries]))
        logprobs.append(torch.tensor([entry.logprobs[0] for entry in entries]))
    assert len(best[0]) > 800
    for kind, least_same, most_moved in ((1, 0.975, 0.02), (2, 0.985, 0.005)):
        assert float((best[0] == best[kind]).float().mean()) > least_same
        assert 0 < float((logprobs[0] - logprobs[kind]).abs().mean()) < most_moved


def test_blocks_take_half_the_bytes_of_a_16_bit_cache() -> None:
    full = KVCacheSpec((LayerCacheSpec((2, 2), 5, torch.bfloat16),) * 3, block_size=16)
    quantized = KVCacheSpec((LayerCacheSpec((2, 2), 5, KV_FP8),) * 3, block_size=16)
    assert 2 * quantized.bytes_per_block == full.bytes_per_block == 3 * 2 * 2 * 16 * 5 * 2
    cache = quantized.allocate(2, CPU)[0]
    assert cache.dtype == KV_FP8
    assert cache.view(2, -1).view(quantized.copy_dtype).numel() * 2 == cache.numel()


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"kv_cache_dtype\n.*'auto', 'fp8' or 'int8_per_token_head'"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")
    assert EngineConfig(kv_cache_dtype="fp8_e4m3") == EngineConfig(kv_cache_dtype="fp8")
    assert select_kv_dtype("auto", CUDA) is None
    assert select_kv_dtype("fp8", CPU) == KV_FP8
    with (
        mock.patch("torch.cuda.get_device_name", return_value="NVIDIA A100"),
        mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)),
        pytest.raises(ConfigError, match="kv_cache_dtype=fp8: NVIDIA A100 has no fp8") as raised,
    ):
        select_kv_dtype("fp8", CUDA)
    assert raised.value.param == "kv_cache_dtype"
    with mock.patch("torch.cuda.get_device_capability", return_value=(8, 9)):
        assert select_kv_dtype("fp8", CUDA) == KV_FP8


def test_embeddings_of_a_decoder_lie_near() -> None:
    texts = ["the quick brown fox jumps over the lazy dog", "rain and sun over paris, fish in the river water"]
    found = []
    for kind in ("auto", "fp8"):
        options = {"runner": "pooling", "device": "cpu", "num_threads": 1, "kv_cache_dtype": kind}
        with LLM(str(tiny_encoder("qwen3")), **options) as llm:
            found.append(torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]))
    cosines = torch.cosine_similarity(*found)
    assert float(cosines.min()) > 0.99
    assert float(cosines.max()) < 1.0 - 1e-6


def test_an_encoder_has_no_cache_to_quantize() -> None:
    with pytest.raises(ConfigError, match="this model has no KV cache"):
        LLM(str(tiny_encoder("bert")), device="cpu", num_threads=1, kv_cache_dtype="fp8")
