"""A GGUF file as a model directory in the layout of transformers: made once, and kept in the user's cache.

It holds config.json, generation_config.json, the tokenizer's files, links to the file (all of them where it is split)
and gguf.json, which says where each tensor lies. The tensors stay in the file, and every other part of the engine meets
a directory like any other.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from app.checkpoints.gguf.architecture import Architecture
from app.checkpoints.gguf.architectures import ROPE_TABLES, architecture_of
from app.checkpoints.gguf.blocks import PLAIN
from app.checkpoints.gguf.config_json import config_json
from app.checkpoints.gguf.header import GgufHeader, GgufTensor
from app.checkpoints.gguf.keys import Keys, texts, token_id
from app.checkpoints.gguf.latent import join_keys_and_values
from app.checkpoints.user_cache import made_once
from app.checkpoints.weight_files import GGUF_MANIFEST
from app.errors import CheckpointError

TOKENIZER = "gguf_tokenizer.json"
_VERSION = 5  # of what is made
_TEMPLATE = "tokenizer.chat_template"
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NORMS = re.compile(r".*norm\.weight")


@cache
def describe(file: Path) -> Path:
    """The directory. CheckpointError names an unusable file, UnsupportedError what is not read."""
    files = _parts(file.resolve())
    stats = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in files]
    key = hashlib.sha256(json.dumps([_VERSION, stats]).encode()).hexdigest()[:32]
    return made_once("gguf", key, partial(_make, files))


def _parts(file: Path) -> list[Path]:
    """All files of a model that is split; CheckpointError names a missing one."""
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match[3])
    names = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (file.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{file.parent / missing[0]} is missing: the model is split into {count}", param="model")
    return [file.parent / name for name in names]


def _make(files: list[Path], directory: Path) -> None:
    headers = [GgufHeader.read(file) for file in files]
    tensors = _tensors(files, headers)
    whole = GgufHeader(headers[0].metadata, {name: tensor for name, (_, tensor) in tensors.items()})
    architecture = architecture_of(whole.metadata)
    tables = {name: _table(files[tensors[name][0]], tensors[name][1]) for name in ROPE_TABLES if name in tensors}
    config = config_json(whole, architecture, tables)
    behind = range(config["num_hidden_layers"], Keys(whole.metadata).size("block_count") or 0)
    used = {name: one for name, one in tensors.items() if name not in tables and not _is_of(name, behind)}
    described = {architecture.own_name(name): entry for name, entry in used.items()}
    directory.mkdir()
    for number, file in enumerate(files):
        (directory / _link(number)).symlink_to(file)
    places = {name: _place(name, *entry, architecture, config.get("head_dim", 0)) for name, entry in described.items()}
    places = architecture.arranged(join_keys_and_values(places), config)
    config |= _quantization(places)
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", _generation(whole.metadata, config["vocab_size"]))
    _write(directory / "tokenizer_config.json", _tokenizer_config(whole.metadata))
    ours = {key: value for key, value in whole.metadata.items() if key.startswith("tokenizer.ggml.")}
    _write(directory / TOKENIZER, ours)
    _write(directory / GGUF_MANIFEST, places)


_Entry = tuple[int, GgufTensor]  # number of the file, and the tensor


def _tensors(files: list[Path], headers: list[GgufHeader]) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in found:
                raise CheckpointError(f"{name} is both in {files[found[name][0]]} and {files[number]}", param="model")
            found[name] = (number, tensor)
    return found


def _is_of(name: str, layers: range) -> bool:
    """True if a tensor is of one of these layers: those behind the last predict further tokens."""
    layer = re.match(r"blk\.(\d{1,6})\.", name)
    return layer is not None and int(layer[1]) in layers


def _quantization(places: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`quantization_config`: the types by module; one for all experts of a layer."""
    modules = {
        part: place["type"]
        for name, place in places.items()
        for part in _parts_of(name.removesuffix(".weight"))
        if place["type"] not in PLAIN and not {"values", "numbers"} & place.keys()
    }
    return {"quantization_config": {"quant_method": "gguf", "modules": modules}} if modules else {}


def _parts_of(module: str) -> list[str]:
    """The modules of one tensor: experts may have their gates above what they let through."""
    both = ".experts.gate_up_proj"
    if not module.endswith(both):
        return [module]
    return [module.removesuffix(both) + f".experts.{part}" for part in ("gate_proj", "up_proj")]


def _table(file: Path, tensor: GgufTensor) -> tuple[float, ...]:
    """The numbers of a small tensor of F32."""
    if tensor.block.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"{file}: a table of rotary frequencies is not F32", param="model")
    with file.open("rb") as opened:
        opened.seek(tensor.begin)
        return struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes))


def _generation(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """An answer ends at the model's last token or at that of a turn."""
    ends = [token_id(metadata, name, vocab_size) for name in ("eos", "eot", "eom")]
    found = list(dict.fromkeys(one for one in ends if one is not None))
    return {"eos_token_id": found} if found else {}


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template, and the special tokens by name."""
    tokens = texts(metadata, "tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {}
    for own, name in names.items():
        if (index := token_id(metadata, name, len(tokens))) is not None:
            config[own] = tokens[index]
    if (template := metadata.get(_TEMPLATE)) is not None:
        if not isinstance(template, str):
            raise CheckpointError(f"GGUF: {_TEMPLATE} is no text", param="model")
        config["chat_template"] = template
    return config


def _place(name: str, number: int, tensor: GgufTensor, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Returns what a worker must know of one tensor to read it."""
    is_paired = architecture.pairs and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))
    if is_paired and (head_dim % 2 or tensor.shape[0] % head_dim):
        raise CheckpointError(f"GGUF: {name} has shape {list(tensor.shape)}, no heads of {head_dim}", param="model")
    is_shifted = _NORMS.fullmatch(name) and not name.endswith(architecture.plain_norm)
    offset = architecture.norm_offset if is_shifted else 0.0
    is_one_row = name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1  # llama.cpp squeezes it
    return {
        "file": _link(number),
        "type": tensor.block.name,
        "shape": [*([1] if is_one_row else []), *tensor.shape],
        "begin": tensor.begin,
        **({"pairs": head_dim} if is_paired else {}),
        **({"offset": offset} if offset else {}),
    }


def _link(number: int) -> str:
    return f"model-{number}.gguf"


def _write(file: Path, content: Mapping[str, Any]) -> None:
    written = json.dumps(content, indent=None if file.name == TOKENIZER else 2, default=list)  # arrays as lists
    file.write_text(written + "\n", encoding="utf-8")
