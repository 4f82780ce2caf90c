"""The files of one adapter, checked as far as that goes without its model: names, types, shapes, ranks. No torch (I8).

Two files count, `adapter_config.json` and `adapter_model.safetensors`. What else lies in the directory is not read;
pickles are refused. The digest of both is the adapter's identity: what its requests' blocks are hashed with (I5), and
what a worker compares with what it has read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from app.checkpoints.adapters.adapter_config import CONFIG_FILE, PARAM, AdapterConfig
from app.checkpoints.model_info import ASSETS
from app.checkpoints.safetensors_header import SafetensorsHeader, TensorEntry
from app.errors import CheckpointError, InvalidRequestError, UnsupportedError

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MOST_CONFIG_BYTES = 1 << 20
MOST_HEADER_BYTES = 8 << 20  # two tensors for each of some ten thousand modules
MOST_TENSORS = 1 << 16
MOST_BYTES = 32 << 30
DIGEST_BYTES = 16
PREFIX = "base_model.model."
FLOATS = ("F32", "F16", "BF16")
_SIDES = {".lora_A.weight": "first", ".lora_B.weight": "second"}
_CHUNK_BYTES = 1 << 22
# What PEFT calls tensors that have no place here, and why.
_REFUSED: Mapping[str, str] = {
    ".lora_magnitude_vector": "DoRA is not supported",
    ".lora_embedding_A": "LoRA on embeddings is not supported",
    ".lora_embedding_B": "LoRA on embeddings is not supported",
    ".trainable_tokens_delta": "embeddings of single tokens are not supported",
    ".lora_B.bias": "a bias behind the second matrix is not supported",
    ".base_layer.bias": "trained biases are not supported",
    ".base_layer.weight": "a whole matrix beside the low-rank ones is not supported",
}


@dataclass(slots=True, frozen=True)
class LowRankEntry:
    """Says where the two matrices of one module lie: first [r, in], second [out, r]."""

    module: str  # its name in the base model's checkpoint
    first: TensorEntry
    second: TensorEntry
    rank: int
    scale: float  # of the product of both


@dataclass(slots=True, frozen=True)
class AdapterFiles:
    """One adapter on disk."""

    directory: Path
    config: AdapterConfig
    modules: Mapping[str, LowRankEntry]

    @classmethod
    def read(cls, directory: str | Path, max_rank: int) -> AdapterFiles:
        """CheckpointError, UnsupportedError and InvalidRequestError (of a rank above `max_rank`) name what is wrong; no
        tensor is read."""
        path = adapter_directory(directory)
        _check_file(path, CONFIG_FILE, MOST_CONFIG_BYTES)
        _check_file(path, WEIGHTS_FILE, MOST_BYTES)
        config = AdapterConfig.read(path / CONFIG_FILE)
        try:
            header = SafetensorsHeader.read(path / WEIGHTS_FILE, MOST_HEADER_BYTES)
        except CheckpointError as error:
            raise CheckpointError(error.message, param=PARAM) from None
        if not 0 < len(header.tensors) <= MOST_TENSORS:
            what = f"{path / WEIGHTS_FILE} holds {len(header.tensors)} tensors, not 1 to {MOST_TENSORS:,}"
            raise CheckpointError(what, param=PARAM)
        return cls(path, config, _modules(path / WEIGHTS_FILE, header.tensors, config, max_rank))

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(entry.rank for entry in self.modules.values())

    def content(self) -> bytearray:
        """All of the file of weights. CheckpointError where that is not what was checked any more."""
        end = max(entry.second.end for entry in self.modules.values())
        end = max(end, *(entry.first.end for entry in self.modules.values()))
        with (self.directory / WEIGHTS_FILE).open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            left = memoryview(content)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if len(content) < end or left:
            what = f"{self.directory / WEIGHTS_FILE} became shorter while it was read"
            raise CheckpointError(what, param=PARAM)
        return content

    def digest(self) -> bytes:
        """The adapter's identity, from its files."""
        with (self.directory / WEIGHTS_FILE).open("rb") as file:
            return self.digest_of(iter(lambda: file.read(_CHUNK_BYTES), b""))

    def digest_of(self, content: Iterable[bytes | memoryview]) -> bytes:
        """The identity of an adapter with this configuration and file of weights, given in pieces."""
        digest = blake2b(len(self.config.content).to_bytes(8, "little") + self.config.content, digest_size=DIGEST_BYTES)
        for piece in content:
            digest.update(piece)
        return digest.digest()


def adapter_directory(name: str | Path) -> Path:
    """The directory of that name, or the adapter that comes with the built-in model."""
    own = ASSETS / name
    return own if len(Path(name).parts) == 1 and (own / CONFIG_FILE).is_file() else Path(name)


def within(directory: str, roots: Iterable[Path]) -> Path:
    """The directory itself, all links followed; InvalidRequestError unless it and the files that count lie within one
    of these."""
    path = Path(directory)
    if not path.is_absolute() or "\0" in directory:
        raise InvalidRequestError(
            f"lora_path: {directory[:256]!r} is not the absolute path of a directory", param=PARAM
        )
    try:
        own, allowed = path.resolve(), [root.resolve() for root in roots]
        files = [(own / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, RuntimeError) as error:
        raise InvalidRequestError(f"lora_path: {directory[:256]!r}: {error}", param=PARAM) from None
    if not any(all(one.is_relative_to(root) for one in (own, *files)) for root in allowed):
        raise InvalidRequestError(
            f"lora_path: {directory[:256]!r} is under none of the directories that adapters may be loaded from",
            param=PARAM,
        )
    return own


def _check_file(directory: Path, name: str, most_bytes: int) -> None:
    try:
        found = (directory / name).stat()
    except OSError as error:
        pickles = [one for one in PICKLES if (directory / one).is_file()]
        if pickles and name == WEIGHTS_FILE:
            what = f"{directory / pickles[0]} is a pickle, which may run code; save the adapter as {WEIGHTS_FILE}"
            raise UnsupportedError(what, param=PARAM) from None
        raise CheckpointError(f"cannot read {directory / name}: {error.strerror}", param=PARAM) from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{directory / name} is no file", param=PARAM)
    if found.st_size > most_bytes:
        raise CheckpointError(f"{directory / name} has {found.st_size} bytes; at most {most_bytes}", param=PARAM)


def _modules(
    file: Path, tensors: Mapping[str, TensorEntry], config: AdapterConfig, max_rank: int
) -> Mapping[str, LowRankEntry]:
    sides: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        module, side = _place(file, name)
        if entry.dtype not in FLOATS:
            raise UnsupportedError(f"{file}: {name} is {entry.dtype}; known: {', '.join(FLOATS)}", param=PARAM)
        if len(entry.shape) != 2 or not all(entry.shape):
            raise CheckpointError(f"{file}: {name} has shape {list(entry.shape)}, no matrix's", param=PARAM)
        sides.setdefault(module, {})[side] = entry
    return {module: _entry(file, module, found, config, max_rank) for module, found in sides.items()}


def _place(file: Path, name: str) -> tuple[str, str]:
    """The module that a tensor is for, and which of its two matrices it is."""
    for ending, side in _SIDES.items():
        if name.startswith(PREFIX) and name.endswith(ending):
            return name[len(PREFIX) : -len(ending)], side
    for part, reason in _REFUSED.items():
        if part in name:
            raise UnsupportedError(f"{file}: {name}: {reason}", param=PARAM)
    raise CheckpointError(f"{file}: {name} is no tensor of a LoRA adapter as PEFT names them", param=PARAM)


def _entry(
    file: Path, module: str, found: Mapping[str, TensorEntry], config: AdapterConfig, max_rank: int
) -> LowRankEntry:
    if found.keys() != {"first", "second"}:
        missing = "lora_B" if "first" in found else "lora_A"
        raise CheckpointError(f"{file}: {PREFIX}{module}.{missing}.weight is missing", param=PARAM)
    first, second = found["first"], found["second"]
    rank, scale = config.of_module(module)
    if (first.shape[0], second.shape[1]) != (rank, rank):
        what = f"lora_A is {list(first.shape)} and lora_B {list(second.shape)}, but {CONFIG_FILE} says rank {rank}"
        raise CheckpointError(f"{file}: {module}: {what}", param=PARAM)
    if rank > max_rank:
        what = f"{module} has rank {rank}, more than max_lora_rank={max_rank}"
        raise InvalidRequestError(f"{file}: {what}", param=PARAM)
    return LowRankEntry(module, first, second, rank, scale)
