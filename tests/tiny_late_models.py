"""Tiny models that compare texts vector by vector, in each of the layouts that such models are published in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from transformers import ModernBertConfig, ModernBertModel

from tests.tiny_encoders import SIZES, tiny_encoder

SIZE = 12


def _projection() -> Dense:
    torch.manual_seed(1)
    act = torch.nn.Identity()
    return Dense(48, SIZE, bias=False, activation_function=act, module_input_name="token_embeddings")


def _library(directory: Path, **options: Any) -> Path:
    """As sentence-transformers saves one."""
    mask = MultiVectorMask([".", ",", "money"], skiplist_tasks=options.pop("skiplist_tasks", None))
    first = Transformer(str(tiny_encoder("bert")), document_length=24, **options)
    modules = [first, _projection(), mask, Normalize(module_input_name="token_embeddings")]
    prompts = {"query": "fish ", "document": "boat "}
    MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts).save(str(directory / "model"))
    return directory / "model"


def _modernbert(directory: Path) -> Path:
    """An encoder with the tokenizer of another one."""
    source = tiny_encoder("bert")
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    marks = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    windows = {"local_attention": 8, "global_attn_every_n_layers": 2, "max_position_embeddings": 130}
    torch.manual_seed(2)
    ModernBertModel(ModernBertConfig(vocab_size=size, **SIZES, **marks, **windows)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    own = {**config, "model_input_names": ["input_ids", "attention_mask"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(own))
    return directory


def _pylate(directory: Path, encoder: Path) -> Path:
    """As PyLate saved one: an encoder, a layer, and flat fields; marks are tokens of the vocabulary."""
    path = directory / "model"
    shutil.copytree(encoder, path)
    kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    entries = [{"idx": i, "name": str(i), "path": at, "type": kind} for i, (at, kind) in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Dense").mkdir()
    _projection().save(str(path / "1_Dense"))
    config = json.loads((path / "1_Dense" / "config.json").read_text())
    kept = {name: config[name] for name in ("in_features", "out_features", "bias", "activation_function")}
    (path / "1_Dense" / "config.json").write_text(json.dumps({**kept, "use_residual": False}))
    own = {"query_prefix": "[MASK] ", "document_prefix": "[UNK] ", "query_length": 14, "document_length": 20}
    more = {"attend_to_expansion_tokens": False, "model_type": "ColBERT", "skiplist_words": [".", ","]}
    (path / "config_sentence_transformers.json").write_text(json.dumps({**own, **more}))
    return path


def _stanford(directory: Path) -> Path:
    """As Stanford's ColBERT saves one: the layer lies with the encoder."""
    path = directory / "model"
    shutil.copytree(tiny_encoder("bert"), path)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    tensors["linear.weight"] = _projection().linear.weight.detach()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    own = {"query_token_id": "[MASK]", "doc_token_id": "[UNK]", "doc_maxlen": 22, "query_maxlen": 16, "dim": SIZE}
    (path / "artifact.metadata").write_text(json.dumps({**own, "attend_to_mask_tokens": False}))
    return path


LAYOUTS = {
    "library": lambda directory: _library(directory),
    "unseen": lambda directory: _library(directory, query_expansion={"strategy": "fixed", "length": 16}),
    "seen": lambda directory: _library(
        directory,
        query_expansion={"strategy": "min", "length": 10, "attend": True, "token": "fox"},
        skiplist_tasks=["query", "document"],
    ),
    "pylate": lambda directory: _pylate(directory, tiny_encoder("bert")),
    "pylate-modernbert": lambda directory: _pylate(directory, _modernbert(directory / "encoder")),
    "stanford": _stanford,
}


def written(layout: str, directory: Path) -> Path:
    """The directory of such a model."""
    return LAYOUTS[layout](directory)
