"""Encoders by their makers' layouts (GTE, Nomic Embed v2): hidden states and classes equal those of a page of plain
matrices each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from app.checkpoints.model_info import ASSETS
from app.errors import CheckpointError, UnsupportedError
from tests.hf_logprobs import prompts
from tests.models.families.published import Page, angles, heads
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 61, 100, 8, 33))
Tensor = torch.Tensor
SIZE, WIDTH, LAYERS, DIM, EXPERTS = 48, 80, 4, 12, 4


def turned(x: Tensor, angle: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), -1)


def seen_both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(1, 2) / DIM**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)


def ntk(inverse_of: Callable[[float], Tensor], theta: float, factor: float, mixed: float | None) -> Tensor:
    """Inverse frequencies as GTE's code stretches them."""
    if mixed is None:
        return inverse_of(theta * factor) / factor ** (2 / DIM)
    a = np.log(factor) / (DIM / 2) ** mixed
    return inverse_of(theta) / torch.exp(a * torch.arange(1, DIM // 2 + 1).float() ** mixed)


def gte(p: Page, ids: Tensor) -> Tensor:
    scaling = p.config.get("rope_scaling") or {"factor": 1.0}
    inverse = 1.0 / p.config["rope_theta"] ** (torch.arange(0, DIM, 2).float() / DIM)
    if scaling["factor"] > 1:
        inverse = ntk(
            lambda theta: 1.0 / theta ** (torch.arange(0, DIM, 2).float() / DIM),
            *(p.config["rope_theta"], scaling["factor"], scaling.get("mixed_b")),
        )
    angle = torch.outer(torch.arange(len(ids)).float(), inverse)
    x = p.tensors["embeddings.word_embeddings.weight"][ids]
    if "embeddings.token_type_embeddings.weight" in p.tensors:
        x = x + p.tensors["embeddings.token_type_embeddings.weight"][0]
    x = p.layer_norm("embeddings.LayerNorm", x, 1e-12)
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        q, k, v = (heads(part, DIM) for part in p.linear(f"{name}.attention.qkv_proj", x).chunk(3, -1))
        out = p.linear(f"{name}.attention.o_proj", seen_both_ways(turned(q, angle), turned(k, angle), v))
        x = p.layer_norm(f"{name}.attn_ln", x + out, 1e-12)
        up, gate = p.linear(f"{name}.mlp.up_gate_proj", x).chunk(2, -1)
        x = p.layer_norm(f"{name}.mlp_ln", x + p.linear(f"{name}.mlp.down_proj", F.gelu(gate) * up), 1e-12)
    return x


def nomic(p: Page, ids: Tensor) -> Tensor:
    angle = angles(len(ids), DIM, 10_000.0)
    x = p.tensors["embeddings.word_embeddings.weight"][ids] + p.tensors["embeddings.token_type_embeddings.weight"][0]
    x = p.layer_norm("emb_ln", x, 1e-5)
    for i in range(LAYERS):
        name = f"encoder.layers.{i}"
        q, k, v = (heads(part, DIM) for part in p.linear(f"{name}.attn.Wqkv", x).chunk(3, -1))
        out = p.linear(f"{name}.attn.out_proj", seen_both_ways(turned(q, angle), turned(k, angle), v))
        x = p.layer_norm(f"{name}.norm1", x + out, 1e-5)
        fed = (
            experts(p, f"{name}.mlp", x)
            if i % 2
            else p.linear(f"{name}.mlp.fc2", F.gelu(p.linear(f"{name}.mlp.fc1", x)))
        )
        x = p.layer_norm(f"{name}.norm2", x + fed, 1e-5)
    return x


def experts(p: Page, name: str, x: Tensor) -> Tensor:
    """Token by token."""
    weights = p.linear(f"{name}.router.layer", x).softmax(-1)
    first, second = (p.tensors[f"{name}.experts.mlp.{part}"].view(EXPERTS, WIDTH, SIZE) for part in ("w1", "w2"))
    found = []
    for token, scores in zip(x, weights, strict=True):
        best, chosen = scores.topk(2)
        parts = [
            weight * (F.gelu(first[e] @ token) @ second[e]) for weight, e in zip(best, chosen.tolist(), strict=True)
        ]
        found.append(torch.stack(parts).sum(0))
    return torch.stack(found) + p.tensors[f"{name}.experts.bias"]


def gte_shapes(types: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (512, SIZE)}
    if types:
        shapes["embeddings.token_type_embeddings.weight"] = (types, SIZE)
    shapes |= normed("embeddings.LayerNorm")
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        shapes |= linear(f"{name}.attention.qkv_proj", 3 * SIZE, SIZE) | linear(f"{name}.attention.o_proj", SIZE, SIZE)
        shapes[f"{name}.mlp.up_gate_proj.weight"] = (2 * WIDTH, SIZE)
        shapes |= linear(f"{name}.mlp.down_proj", SIZE, WIDTH) | normed(f"{name}.attn_ln") | normed(f"{name}.mlp_ln")
    return {prefix + name: shape for name, shape in shapes.items()}


def nomic_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {"embeddings.word_embeddings.weight": (512, SIZE), "embeddings.token_type_embeddings.weight": (1, SIZE)}
    shapes |= normed("emb_ln")
    for i in range(LAYERS):
        name = f"encoder.layers.{i}"
        shapes |= linear(f"{name}.attn.Wqkv", 3 * SIZE, SIZE) | linear(f"{name}.attn.out_proj", SIZE, SIZE)
        shapes |= normed(f"{name}.norm1") | normed(f"{name}.norm2")
        if i % 2:
            shapes[f"{name}.mlp.router.layer.weight"] = (EXPERTS, SIZE)
            shapes[f"{name}.mlp.experts.bias"] = (SIZE,)
            shapes |= {f"{name}.mlp.experts.mlp.{part}": (EXPERTS * WIDTH, SIZE) for part in ("w1", "w2")}
        else:
            shapes |= linear(f"{name}.mlp.fc1", WIDTH, SIZE) | linear(f"{name}.mlp.fc2", SIZE, WIDTH)
    return shapes


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def normed(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (SIZE,), f"{name}.bias": (SIZE,)}


GTE = {
    **{"architectures": ["NewModel"], "model_type": "new", "hidden_size": SIZE, "intermediate_size": WIDTH},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 130},
    **{"layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm", "position_embedding_type": "rope", "pack_qkv": True},
    **{"hidden_act": "gelu", "rope_theta": 160_000, "logn_attention_scale": False, "type_vocab_size": 0},
}
NTK = {"type": "ntk", "factor": 8.0}
NOMIC = {
    **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": SIZE, "n_head": 4, "n_inner": WIDTH},
    **{"n_layer": LAYERS, "n_positions": 130, "vocab_size": 512, "activation_function": "gelu", "moe_top_k": 2},
    **{"num_experts": EXPERTS, "moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "type_vocab_size": 1},
    **{"layer_norm_epsilon": 1e-5, "rotary_emb_base": 10_000, "rotary_emb_fraction": 1.0, "num_shared_experts": 0},
    **{"expert_choice_router": False, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True},
}
Reference = Callable[[Page, Tensor], Tensor]
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], Reference]] = {
    "gte": (GTE, gte_shapes(0), gte),
    "gte-multilingual": ({**GTE, "rope_scaling": NTK, "type_vocab_size": 1}, gte_shapes(1), gte),
    "gte-mixed": ({**GTE, "architectures": ["GteModel"], "model_type": "gte", "rope_scaling": {**NTK, "mixed_b": 0.7}},
                  gte_shapes(0), gte),
    "nomic2": (NOMIC, nomic_shapes(), nomic),
}  # fmt: skip


@cache
def written(name: str) -> tuple[Path, Page]:
    config, shapes, _ = VARIANTS[name]
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    tensors = drawn(shapes)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory, Page(tensors, config)


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith("weight")
        tensors[name] = 1.0 + 0.2 * numbers if is_norm else numbers * 0.2
    return tensors


def agree(name: str, **options: Any) -> None:
    (directory, page), reference = written(name), VARIANTS[name][2]
    more = {"max_model_len": 128, "max_num_batched_tokens": 140, **options}
    with PoolingDriver(directory, tokenizer=TOKENIZER, **more) as driver:
        found = driver.pool(PROMPTS, task="token_embed", use_activation=False)
        assert driver.num_steps < len(PROMPTS), "no two prompts shared a step"
    for prompt, result in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(result, reference(page, torch.tensor(prompt)).numpy(), atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_of_prompts_that_share_steps(name: str) -> None:
    agree(name)


OVER_RANKS = ("gte-multilingual", "nomic2")  # the others: acceptance


@pytest.mark.parametrize(
    "name", [name if name in OVER_RANKS else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_over_two_ranks(name: str) -> None:
    agree(name, executor="local_processes", tensor_parallel_size=2)


def test_classes_of_gte(tmp_path: Path) -> None:
    shapes = gte_shapes(1, "new.") | linear("new.pooler.dense", SIZE, SIZE) | linear("classifier", 3, SIZE)
    tensors = drawn(shapes)
    save_file(tensors, tmp_path / "model.safetensors")
    labels = {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}, "type_vocab_size": 1}
    config = {**GTE, **labels, "architectures": ["NewForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = Page({name.removeprefix("new."): tensor for name, tensor in tensors.items()}, config)
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        found = driver.pool(PROMPTS, task="classify", use_activation=False)
    for prompt, logits in zip(PROMPTS, found, strict=True):
        pooled = torch.tanh(page.linear("pooler.dense", gte(page, torch.tensor(prompt))[0]))
        np.testing.assert_allclose(logits, page.linear("classifier", pooled).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": "much"}}, "factor"),
        ("nomic2", {"expert_choice_router": True}, "expert_choice_router"),
        ("nomic2", {"num_shared_experts": 1}, "num_shared_experts"),
        ("nomic2", {"mlp_fc1_bias": False}, "mlp_fc1_bias"),
        ("nomic2", {"moe_top_k": 9}, "9 experts of 4"),
    ],
)
def test_what_is_not_supported_is_named(name: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    directory, _ = written(name)
    (tmp_path / "config.json").write_text(json.dumps({**VARIANTS[name][0], **changes}))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises((UnsupportedError, CheckpointError), match=named):
        PoolingDriver(tmp_path, tokenizer=TOKENIZER)
