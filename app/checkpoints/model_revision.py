"""Identifies the weights that a KV cache was computed with and how it is kept by one short string: what the root of
every block hash begins with (I5).

Two directories with the same files give the same revision on whatever node and under whatever name they lie; new
weights under an old name give another one, so a replica that still runs the old ones is never taken to share prefixes
with the new. Of the weights only samples are read, from the begin, middle and end of each tensor: training changes
nearly every number of the tensors that it changes at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from app.checkpoints.adapters.task_adapter import task_adapter
from app.checkpoints.hub import commit_of
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.safetensors_header import SafetensorsHeader
from app.config.engine import EngineConfig
from app.errors import CheckpointError

SAMPLE_BYTES = 64
MAX_SAMPLED_TENSORS = 8192  # in all files together; a read each, three where a tensor is large
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def model_revision(info: ModelInfo, config: EngineConfig) -> str:
    """32 hex digits over the model's description, its weight files' headers and samples of their tensors, and the
    options that change what a KV block holds."""
    digest = blake2b(digest_size=16)
    is_dummy = config.load_format == "dummy"
    kinds = [config.dtype, config.quantization, config.kv_cache_dtype, config.recurrent_state_dtype]
    options = [*kinds, is_dummy, config.seed if is_dummy else 0]
    _add(digest, json.dumps([info.hf_config, options], sort_keys=True).encode())
    commit = commit_of(info.directory)
    if commit is not None:  # a hub's, the same everywhere; there need be no weights on this node
        _add(digest, commit.encode())
    paths = [] if is_dummy or commit is not None else _weight_files(info)
    for path in paths:
        _add(digest, path.relative_to(info.directory).as_posix().encode())
        _add(digest, path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb", buffering=0) as file:
            is_text = path.suffix == ".json"
            for part in [file.read()] if is_text else _samples(file, path, MAX_SAMPLED_TENSORS // len(paths) + 1):
                _add(digest, part)
    return digest.hexdigest()


def _weight_files(info: ModelInfo) -> list[Path]:
    """All files that the weights come from, those of the adapter that is added to them too."""
    patterns = [*WEIGHT_FILES]
    if (adapter := task_adapter(info.hf_config)) is not None:
        patterns += [f"{adapter}/{name}" for name in ADAPTER_FILES]
    return sorted(path for pattern in patterns for path in info.directory.glob(pattern))


def _samples(file: FileIO, path: Path, most: int) -> Iterator[bytes]:
    """Yields what tells a file of weights from others: a safetensors file's header (names, types, places of tensors),
    and samples of `most` tensors, evenly chosen; of other files samples of `most` places."""
    places = _places(path)
    if places:
        yield file.read(places[0][0])
    else:
        size = path.stat().st_size
        step = -(-size // most) or 1
        places = [(begin, min(begin + step, size)) for begin in range(0, size, step)]
    for begin, end in places[:: -(-len(places) // most) or 1]:
        middle, last = (begin + end) // 2, max(begin, end - SAMPLE_BYTES)
        for place in sorted({begin, middle, last}):
            file.seek(place)
            yield file.read(min(SAMPLE_BYTES, end - place))


def _places(path: Path) -> list[tuple[int, int]]:
    """Finds where each tensor's data begin and end; nothing of a file that is none (a pointer to one, say): the workers
    have loaded what they need by now."""
    try:
        return [(entry.begin, entry.end) for entry in SafetensorsHeader.read(path).tensors.values()]
    except CheckpointError:
        return []


def _add(digest: blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
