"""Jina Embeddings v2 in their published layout: vectors equal those of a page of plain matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from app.checkpoints.model_info import ASSETS
from app.errors import UnsupportedError
from tests.hf_logprobs import prompts
from tests.models.families.published import Page, heads
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 33))
Tensor = torch.Tensor
SIZE, WIDTH, LAYERS, HEADS, DIM = 72, 80, 2, 6, 12
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])  # of 4 heads, and every second of 8
CONFIG = {
    **{"architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "vocab_size": 512, "hidden_size": SIZE},
    **{"intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu"},
    **{"max_position_embeddings": 130, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "emb_pooler": "mean"},
    **{"position_embedding_type": "alibi", "feed_forward_type": "geglu", "pad_token_id": 0},
}
# The model of programs is told by its code's name.
OF_PROGRAMS = {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}


def reference(p: Page, ids: Tensor) -> Tensor:
    """Hidden states [T, C]."""
    act = F.relu if p.config["feed_forward_type"] == "reglu" else F.gelu
    words, types = (p.tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
    x = p.layer_norm("embeddings.LayerNorm", words[ids] + types[0], 1e-12)
    places = torch.arange(len(ids))
    lowered = SLOPES[:, None, None] * (places[:, None] - places).abs()
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        q, k, v = (p.linear(f"{name}.attention.self.{one}", x) for one in ("query", "key", "value"))
        if OF_PROGRAMS.items() <= p.config.items():
            q = p.layer_norm(f"{name}.attention.self.layer_norm_q", q, 1e-12)
            k = p.layer_norm(f"{name}.attention.self.layer_norm_k", k, 1e-12)
        q, k, v = (heads(one, DIM) for one in (q, k, v))
        seen = ((q @ k.transpose(1, 2) / DIM**0.5 - lowered).softmax(-1) @ v).transpose(0, 1).flatten(1)
        out = p.linear(f"{name}.attention.output.dense", seen)
        attended = p.layer_norm(f"{name}.attention.output.LayerNorm", x + out, 1e-12)
        if OF_PROGRAMS.items() <= p.config.items():
            x = p.layer_norm(f"{name}.layer_norm_1", x + attended, 1e-12)
            up, gate = p.linear(f"{name}.mlp.up_gated_layer", x).chunk(2, -1)
            x = p.layer_norm(f"{name}.layer_norm_2", x + p.linear(f"{name}.mlp.down_layer", up * act(gate)), 1e-12)
            continue
        x = attended
        gate, up = p.linear(f"{name}.mlp.gated_layers", x).chunk(2, -1)
        x = p.layer_norm(f"{name}.mlp.layernorm", x + p.linear(f"{name}.mlp.wo", act(gate) * up), 1e-12)
    return x


def published(directory: Path, **changes: Any) -> Page:
    """Writes a random checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{name}_embeddings.weight": (rows, SIZE)
                                          for name, rows in (("word", 512), ("token_type", 2))}  # fmt: skip
    norms, linears = ["embeddings.LayerNorm"], {"pooler.dense": (SIZE, SIZE)}
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        linears |= {f"{name}.attention.self.{one}": (SIZE, SIZE) for one in ("query", "key", "value")}
        of_programs = "auto_map" in changes
        names = ("mlp.up_gated_layer", "mlp.down_layer") if of_programs else ("mlp.gated_layers", "mlp.wo")
        linears |= {f"{name}.attention.output.dense": (SIZE, SIZE), f"{name}.{names[1]}": (SIZE, WIDTH)}
        shapes[f"{name}.{names[0]}.weight"] = (2 * WIDTH, SIZE)
        further = ("layer_norm_1", "layer_norm_2", "attention.self.layer_norm_q", "attention.self.layer_norm_k")
        more = further if of_programs else ("mlp.layernorm",)
        norms += [f"{name}.{norm}" for norm in ("attention.output.LayerNorm", *more)]
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"{name}.{leaf}": (SIZE,) for name in norms for leaf in ("weight", "bias")}
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape) * 0.2 + (len(shape) == 1 and name.endswith("weight")) for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return Page(tensors, CONFIG | changes)


def agree(directory: Path, page: Page, **options: Any) -> None:
    """Vectors, means of a text's tokens, equal the page's."""
    with PoolingDriver(directory, tokenizer=TOKENIZER, max_model_len=128, **options) as driver:
        found = driver.pool(PROMPTS, task="embed")
    for prompt, vector in zip(PROMPTS, found, strict=True):
        expected = F.normalize(reference(page, torch.tensor(prompt)).mean(0), dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


VARIANTS: list[dict[str, Any]] = [{}, {"feed_forward_type": "reglu"}, OF_PROGRAMS]


@pytest.mark.parametrize("changes", VARIANTS, ids=["geglu", "reglu", "programs"])
def test_vectors(tmp_path: Path, changes: dict[str, Any]) -> None:
    agree(tmp_path, published(tmp_path, **changes))


@pytest.mark.parametrize("changes", [{}, OF_PROGRAMS], ids=["geglu", "programs"])
def test_over_two_ranks(tmp_path: Path, changes: dict[str, Any]) -> None:
    agree(tmp_path, published(tmp_path, **changes), executor="local_processes", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"feed_forward_type": "original"}, "feed_forward_type"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    published(tmp_path, **changes)
    with pytest.raises(UnsupportedError, match=named):
        PoolingDriver(tmp_path, tokenizer=TOKENIZER)
