"""How much memory a model takes, from its JSON files and the headers of its safetensors: nothing is loaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from app.config import EngineConfig
from app.engine.model_info import ModelInfo
from app.errors import CheckpointError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def compute_dtype(config: EngineConfig, info: ModelInfo, on_gpu: bool) -> str:
    """The type that weights and KV cache will have."""
    if config.dtype != "auto":
        return config.dtype
    return info.dtype if on_gpu else "float32"


def weights_bytes(info: ModelInfo, dtype: str) -> int:
    """Bytes of all weights in `dtype`. CheckpointError names a file that is missing or no safetensors file."""
    return sum(_num_elements(file) for file in _files(info.directory)) * ITEM_BYTES.get(dtype, 2)


def kv_bytes_per_token(info: ModelInfo, dtype: str) -> int:
    """Keys and values of one token over all layers."""
    return 2 * info.num_layers * info.num_kv_heads * info.head_dim * ITEM_BYTES.get(dtype, 2)


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}: the weights are missing")
        return [directory / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: {error!r}") from None
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"{directory / missing[0]} is missing, although {INDEX} lists it")
    return [directory / name for name in names]


def _num_elements(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > file.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(opened.read(length))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from None
