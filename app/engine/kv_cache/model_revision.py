"""Which weights a KV cache was computed with and how it is kept, as one short string: what the root of every block
hash begins with (I5).

Two directories with the same files give the same revision on whatever node and under whatever name they lie; new
weights under an old name give another one, so a replica that still runs the old ones is never taken to share prefixes
with the new. Weights are not read: their headers, names and sizes are.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from app.config import EngineConfig
from app.engine.model_info import ModelInfo

HEADER_BYTES = 1 << 20  # of each weight file; a safetensors header (names, shapes, offsets) is mostly shorter
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def model_revision(info: ModelInfo, config: EngineConfig) -> str:
    """32 hex digits over the model's description, its weight files' headers, and the options that change what a KV
    block holds."""
    digest = blake2b(digest_size=16)
    is_dummy = config.load_format == "dummy"
    kinds = [config.dtype, config.quantization, config.kv_cache_dtype]
    options = [*kinds, config.load_format, config.seed if is_dummy else 0]
    _add(digest, json.dumps([info.hf_config, options], sort_keys=True).encode())
    for path in [] if is_dummy else sorted(path for name in WEIGHT_FILES for path in info.directory.glob(name)):
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        _add(digest, path.name.encode())
        _add(digest, path.stat().st_size.to_bytes(8, "little"))
        _add(digest, _header(path, head))
    return digest.hexdigest()


def _header(path: Path, head: bytes) -> bytes:
    """What identifies a file's content at its start: for safetensors the length-prefixed header, no tensor data."""
    if path.suffix != ".safetensors":
        return head
    return head[: 8 + int.from_bytes(head[:8], "little")]


def _add(digest: blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
