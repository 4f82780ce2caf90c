"""A needle in a haystack, with an unquantized and an fp8 KV cache.

The model is made by hand, so what it should answer is known. A token of the haystack says "key i has value j"; the last
token asks for a key. One layer of attention looks it up: queries and keys lie in the slow half of the rotation, where
position does not count, values in directions of their own. The needle's key occurs once; every other one many times,
some of them nearly parallel to it.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from tests.tiny_models import _root

KEYS, VALUES, PARTS = 60, 16, 32  # PARTS: dimensions of a key and of a value
TOKENS = KEYS * VALUES + KEYS + VALUES  # statements, questions, answers
STRENGTH = 60.0  # score of the right key; ln(16384) = 9.7 is what the haystack weighs by its number alone
SLOW = [*range(16, 32), *range(48, 64)]  # those of a head's 64 dimensions that 16,384 positions turn by < 0.02


def statement(key: int, value: int) -> int:
    return key * VALUES + value


def question(key: int) -> int:
    return KEYS * VALUES + key


def answer(value: int) -> int:
    return KEYS * VALUES + KEYS + value


@functools.cache
def lookup_model() -> Path:
    """Hidden dimensions: statements' keys, statements' values, questions' keys, what attention found."""
    generator = torch.Generator().manual_seed(0)
    keys = F.normalize(torch.randn(KEYS, PARTS, generator=generator), dim=1)
    values = torch.linalg.qr(torch.randn(PARTS, PARTS, generator=generator))[0][:VALUES]
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=4 * PARTS, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=20_000, rope_theta=1e12,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        table, layer = model.model.embed_tokens.weight, model.model.layers[0].self_attn
        said, found = table[: KEYS * VALUES].view(KEYS, VALUES, -1), slice(3 * PARTS, 4 * PARTS)
        said[:, :, :PARTS], said[:, :, PARTS : 2 * PARTS] = keys[:, None], values
        table[KEYS * VALUES :][:KEYS, 2 * PARTS : 3 * PARTS] = keys
        # A norm makes a statement's key sqrt(64) long and a question's sqrt(128); the score is divided by 8.
        gain = STRENGTH * 8 / (64 * 128) ** 0.5
        for i, dim in enumerate(SLOW):
            layer.k_proj.weight[dim, i] = 1.0
            layer.q_proj.weight[[dim, 64 + dim], 2 * PARTS + i] = gain
        layer.v_proj.weight[:PARTS, PARTS : 2 * PARTS] = torch.eye(PARTS)
        layer.o_proj.weight[found, :PARTS] = torch.eye(PARTS)
        model.lm_head.weight[KEYS * VALUES + KEYS :, found] = values
    directory = Path(tempfile.mkdtemp(prefix="lookup-", dir=_root()))
    model.save_pretrained(directory)
    return directory


def haystack(length: int, seed: int) -> tuple[list[int], dict[int, int]]:
    """Statements of `length`, and the three needles in it (early, in the middle, late): key -> value."""
    rng = random.Random(seed)
    order = rng.sample(range(KEYS), KEYS)
    tokens = [statement(rng.choice(order[3:]), rng.randrange(VALUES)) for _ in range(length)]
    needles = {key: rng.randrange(VALUES) for key in order[:3]}
    for (key, value), depth in zip(needles.items(), (0.05, 0.5, 0.95), strict=True):
        tokens[int(depth * length)] = statement(key, value)
    return tokens, needles


def look_up(length: int, num_haystacks: int, **options: Any) -> None:
    """Every needle is found; the second and third question find the haystack cached."""
    common = {"tokenizer": str(ASSETS / "tiny-chat"), "max_model_len": length + 16, "max_num_seqs": 2, "block_size": 64}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    with LLM(str(lookup_model()), **{**common, **options}) as llm:
        for seed in range(num_haystacks):
            tokens, needles = haystack(length, seed)
            for index, (key, value) in enumerate(needles.items()):
                (output,) = llm.generate([[*tokens, question(key)]], params, use_tqdm=False)
                assert output.outputs[0].token_ids[0] == answer(value), (seed, index)
                assert (output.num_cached_tokens > length // 2) == (index > 0)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_16k_tokens(kind: str) -> None:
    look_up(16_384, 1, kv_cache_dtype=kind, device="cpu", num_threads=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_16k_tokens_on_the_gpu(kind: str) -> None:
    look_up(16_384, 4, kv_cache_dtype=kind, device="cuda", dtype="bfloat16", gpu_memory_utilization=0.2)
