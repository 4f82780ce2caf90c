"""Logits and greedy tokens of every family and its variants equal transformers', on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from app.checkpoints.model_info import ModelInfo
from app.models.decoder import CausalLM
from app.models.families.gemma3 import Gemma3ForCausalLM
from app.models.families.ministral import Ministral3ForCausalLM
from tests.hf_logprobs import check_logprobs, prompts
from tests.models.families.expert_variants import LATENT, LATENT_YARN
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

OLD = {"without": ["num_key_value_heads", "head_dim", "intermediate_size"]}
GPT2 = {**OLD, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 100}
OPT = {**OLD, "ffn_dim": 100, "word_embed_proj_dim": 64, "max_position_embeddings": 128}
NEOX = {"without": ["num_key_value_heads", "head_dim"], "num_attention_heads": 4, "max_position_embeddings": 128}
FALCON = {**OLD, "num_attention_heads": 4, "ffn_hidden_size": 100, "alibi": False, "max_position_embeddings": 128}
GPTJ = {**OLD, "num_attention_heads": 4, "rotary_dim": 8, "n_positions": 128, "n_inner": 100}
PLAIN = {"without": ["num_key_value_heads", "head_dim"], "num_attention_heads": 4, "max_position_embeddings": 128}
NEO = {**PLAIN, "window_size": 9}
NO_DIM = {"without": ["head_dim"]}
JETMOE = {
    **{"kv_channels": 16, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "without": ["head_dim", "num_attention_heads"],
}
UNSCALED = {"scale_embedding": False}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 10 for i in range(16)],
    "long_factor": [2.0 + i / 5 for i in range(16)],
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
FOUR = {"num_hidden_layers": 4, "sliding_window": 9}
PAD = {"pad_token_id": 0}
GEMMA4 = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9},
    **{"global_head_dim": 48, "hidden_size_per_layer_input": 0, "num_key_value_heads": 2},
}
SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
PER_LAYER = {
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 331, "final_logit_softcapping": 5.0},
}
GEMMA3N = {
    **{**SIX, **PER_LAYER, **PAD, "sliding_window": 9, "num_kv_shared_layers": 2, "altup_num_inputs": 3},
    **{"laurel_rank": 8, "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.9, 0.0, 0.8]},
}
# name: (transformers' model type, changes to the tiny configuration)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {"sliding_window": 9, "num_hidden_layers": 7, "query_pre_attn_scalar": 40}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n-unshared": ("gemma3n_text", {**GEMMA3N, "num_kv_shared_layers": 0, "altup_correct_scale": False}),
    "gemma4": ("gemma4_text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-shared": (
        "gemma4_text",
        {**GEMMA4, **PER_LAYER, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, **SIX},
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            **GEMMA4,
            **PER_LAYER,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 2}),
    "phi-qk-norm": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {**PAD, "sliding_window": 11}),
    "phi4-mini": ("phi3", {**PAD, "tie_word_embeddings": True, "rope_parameters": PARTIAL}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-relu": ("gpt2", {**GPT2, "n_inner": None, "activation_function": "relu"}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox-serial": ("gpt_neox", {**NEOX, "use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", OPT),
    "opt-no-final-norm": ("opt", {**OPT, "_remove_final_layer_norm": True}),
    "opt-350m": ("opt", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "falcon": ("falcon", {**FALCON, "multi_query": True, "bias": False}),
    "falcon-plain-heads": ("falcon", {**FALCON, "multi_query": False, "bias": True, "parallel_attn": False}),
    "falcon-alibi": (
        "falcon",
        {**FALCON, "multi_query": False, "bias": True, "parallel_attn": False, "alibi": True},
    ),
    "falcon-new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "bloom": ("bloom", {**OLD, "num_attention_heads": 4}),
    "bloom-6-heads": ("bloom", {**OLD, "hidden_size": 96, "num_attention_heads": 6}),
    "mpt": ("mpt", {**OLD, "num_attention_heads": 4, "tie_word_embeddings": True}),
    "mpt-clipped": (
        "mpt",
        {**OLD, "hidden_size": 96, "num_attention_heads": 6, "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.2}},
    ),
    "gptj": ("gptj", GPTJ),
    "codegen": ("codegen", GPTJ),
    "gpt_neo": ("gpt_neo", {**NEO, "num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    "gpt_neo-local": ("gpt_neo", {**NEO, "attention_types": [[["local"], 2]], "tie_word_embeddings": True}),
    "xglm": ("xglm", {**OLD, "num_attention_heads": 4, "ffn_dim": 100, "pad_token_id": 1, "scale_embedding": True}),
    "xglm-unscaled": ("xglm", {**OLD, "num_attention_heads": 4, "ffn_dim": 100, "pad_token_id": 40, **UNSCALED}),
    "biogpt": ("biogpt", {**PLAIN, "pad_token_id": 1}),
    "biogpt-unscaled": ("biogpt", {**PLAIN, "pad_token_id": 1, **UNSCALED}),
    "diffllama": ("diffllama", {**NO_DIM, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "diffllama-biases": (
        "diffllama",
        {**NO_DIM, "num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": True},
    ),
    "doge": ("doge", {}),
    "doge-windows": (
        "doge",
        {"sliding_window": 9, "num_attention_heads": 4, "num_key_value_heads": 2, "mlp_bias": True},
    ),
    "jetmoe": ("jetmoe", JETMOE),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "without": ["head_dim"]}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "without": ["head_dim"]}),
    "stablelm-qk-norm": (
        "stablelm",
        {"qk_layernorm": True, "num_attention_heads": 4, "num_key_value_heads": 2, "without": ["head_dim"]},
    ),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere-plus": ("cohere", {"use_qk_norm": True, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "cohere2": ("cohere2", FOUR),
    "olmo2": ("olmo2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "olmo3": ("olmo3", FOUR),
    "granite": ("granite", MULTIPLIERS),
    "glm": ("glm", PAD),
    "glm4": ("glm4", {**PAD, "attention_bias": True}),
    "exaone4": ("exaone4", {**FOUR, "sliding_window_pattern": 2}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": ("ernie4_5", {**PAD, "use_bias": True, "tie_word_embeddings": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {**PAD, "num_hidden_layers": 4}),
    "smollm3-windows": ("smollm3", {**PAD, **FOUR, "use_sliding_window": True}),
    "ministral": ("ministral", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
    "ministral3": ("ministral3", {"rope_parameters": YARN}),
    "minicpm3": ("minicpm3", {**LATENT, "scale_emb": 3, "dim_model_base": 32}),
    "minicpm3-one-product": ("minicpm3", {**LATENT, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "youtu": ("youtu", LATENT),
    "youtu-yarn": ("youtu", {**LATENT, "rope_parameters": LATENT_YARN, "attention_bias": True}),
    "youtu-halves": ("youtu", {**LATENT, "q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True}),
}
# The text parts of models that also see, as published: gemma-3-4b-it, gemma-3-27b-it and Mistral-Small-3.1.
GEMMA3 = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
TEXT_PARTS: dict[str, tuple[str, type[CausalLM], dict[str, Any]]] = {
    "gemma3-4b": (
        "gemma3",
        Gemma3ForCausalLM,
        {**GEMMA3, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    ),
    "gemma3-27b": (
        "gemma3",
        Gemma3ForCausalLM,
        {
            **{**GEMMA3, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62},
            **{"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168},
        },
    ),
    "mistral-small3": (
        "mistral3",
        Ministral3ForCausalLM,
        {
            **{"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072},
            **{"rope_theta": 1e9, "rms_norm_eps": 1e-5, "sliding_window": None, "max_position_embeddings": 131072},
        },
    ),
}


@pytest.mark.parametrize("name", list(TEXT_PARTS))
def test_the_text_part_of_a_model_that_sees_is_what_transformers_reads(name: str, tmp_path: Path) -> None:
    model_type, family, text = TEXT_PARTS[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": text}))
    judge = AutoConfig.from_pretrained(tmp_path).text_config
    info = ModelInfo.from_directory(str(tmp_path))
    settings = family.settings(info)
    for size in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
        assert getattr(settings, size) == getattr(info, size) == getattr(judge, size), size
    heads = judge.num_attention_heads, judge.num_key_value_heads
    assert (settings.num_layers, settings.num_heads, settings.num_kv_heads) == (judge.num_hidden_layers, *heads)
    assert info.max_position_embeddings == judge.max_position_embeddings
    for layer_type in settings.rope_types or ("",):
        rope = family.ropes(info, settings, 4096)(layer_type)
        expected = judge.rope_parameters[layer_type] if layer_type else judge.rope_parameters
        assert (rope.rope_type, rope.theta) == (expected["rope_type"], expected["rope_theta"])
        assert rope.parameters.get("factor") == expected.get("factor")


@pytest.mark.parametrize("name", list(VARIANTS))
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    family, changes = VARIANTS[name]
    check(tiny_model(family, **changes), (3, 16, 37, 70), 128)


@pytest.mark.parametrize(("lengths", "max_model_len"), [((3, 16, 40), 64), ((66, 80), 128)])
def test_longrope_has_one_table_for_each_context(lengths: tuple[int, ...], max_model_len: int) -> None:
    """transformers takes the table by the text's length; here the context decides, so that cached keys stay true."""
    changes = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
    check(tiny_model("phi3", **PAD, **changes, rope_parameters=LONGROPE), lengths, max_model_len)


def check(directory: Path, lengths: tuple[int, ...], max_model_len: int) -> None:
    judge = hf_model(directory)
    asked = prompts(lengths)
    expected = [hf_greedy(judge, prompt, 8) for prompt in asked]
    assert len({tuple(tokens) for tokens in expected}) == len(asked), "the model says the same whatever it is asked"
    driver = Driver(str(directory), chunk=20, max_model_len=max_model_len)
    assert [run.tokens for run in driver.run([Run(prompt, greedy(8)) for prompt in asked])] == expected
    logits = all_logits(driver, asked[-1])
    with torch.inference_mode():
        exact = judge(torch.tensor([asked[-1]])).logits[0]
    assert logits.shape == exact.shape
    assert (logits - exact).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(VARIANTS))
def test_on_a_gpu(name: str) -> None:
    """Prompts in chunks, and tokens from replayed CUDA graphs, through the Triton kernels."""
    family, changes = VARIANTS[name]
    check_logprobs(tiny_model(family, **changes), "cuda", 2e-2)


def test_logprobs() -> None:
    """The same check on a CPU."""
    check_logprobs(tiny_model("llama"), "cpu", 1e-3)
