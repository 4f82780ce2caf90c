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
# What PEFT calls the tensors of a module that it changes, and what they are here.
_SIDES: Mapping[str, str] = {
    ".lora_A.weight": "first",
    ".lora_B.weight": "second",
    ".lora_embedding_A": "table_first",
    ".lora_embedding_B": "table_second",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_magnitude_vector": "magnitude",
    ".lora_B.bias": "second_bias",
    ".base_layer.bias": "bias",
    ".base_layer.weight": "base",
}
_VECTORS = ("magnitude", "second_bias", "bias")
_PAIRS = ("first", "second", "table_first", "table_second")
_EXPERTS, _INNER = ".experts", ".base_layer"
_CHUNK_BYTES = 1 << 22
# What PEFT calls tensors that have no place here, and why.
_REFUSED: Mapping[str, str] = {
    ".trainable_tokens_delta": "embeddings of single tokens are not supported",
}


@dataclass(slots=True, frozen=True)
class LowRankEntry:
    """Says where the two matrices of one module lie: first [r, in], second [out, r]; of an embedding, whose inputs are
    tokens, too."""

    module: str  # its name in the base model's checkpoint
    first: TensorEntry
    second: TensorEntry
    rank: int
    scale: float  # of the product of both
    is_table: bool = False  # an embedding's
    # Experts whose matrices are in these; 0: it is no parameter of experts. Theirs are rows [E, r] of the first, and
    # columns [r, E] of the second.
    num_experts: int = 0


@dataclass(slots=True, frozen=True)
class ModuleExtras:
    """Says where lies what an adapter holds of one module beside two matrices; None: it does not."""

    magnitude: TensorEntry | None = None  # [out], of DoRA
    second_bias: TensorEntry | None = None  # [out], behind the second matrix
    bias: TensorEntry | None = None  # [out], in place of the base model's
    weight: TensorEntry | None = None  # [out, in], the same
    base: TensorEntry | None = None  # [V, C]: the base model's own, which PEFT may write beside


@dataclass(slots=True, frozen=True)
class AdapterFiles:
    """One adapter on disk."""

    directory: Path
    config: AdapterConfig
    modules: Mapping[str, LowRankEntry]
    extras: Mapping[str, ModuleExtras]
    end: int  # of the last tensor

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
        found = _sides(path / WEIGHTS_FILE, header.tensors, config)
        modules, extras = {}, {}
        for module, sides in found.items():
            if any(side in sides for side in _PAIRS):
                modules[module] = _entry(path / WEIGHTS_FILE, module, sides, config, max_rank)
            if any(side not in _PAIRS for side in sides):
                extras[module] = _extras(path / WEIGHTS_FILE, module, sides, max_rank)
        return cls(path, config, modules, extras, max(entry.end for entry in header.tensors.values()))

    @property
    def rank(self) -> int:
        """The largest rank of its modules; a whole matrix has as many as outputs."""
        whole = [extras.weight.shape[0] for extras in self.extras.values() if extras.weight is not None]
        return max([entry.rank for entry in self.modules.values()] + whole, default=1)

    def content(self) -> bytearray:
        """All of the file of weights. CheckpointError where that is not what was checked any more."""
        with (self.directory / WEIGHTS_FILE).open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            left = memoryview(content)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if len(content) < self.end or left:
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


def _sides(
    file: Path, tensors: Mapping[str, TensorEntry], config: AdapterConfig
) -> Mapping[str, dict[str, TensorEntry]]:
    """The tensors of each module, by what they are."""
    sides: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        module, side = _place(file, name, config)
        if entry.dtype not in FLOATS:
            raise UnsupportedError(f"{file}: {name} is {entry.dtype}; known: {', '.join(FLOATS)}", param=PARAM)
        if len(entry.shape) != (1 if side in _VECTORS else 2) or not all(entry.shape):
            what = "vector" if side in _VECTORS else "matrix"
            raise CheckpointError(f"{file}: {name} has shape {list(entry.shape)}, no {what}'s", param=PARAM)
        if side in sides.setdefault(module, {}):
            raise CheckpointError(f"{file}: {name}: another tensor is the {side} of this module", param=PARAM)
        sides[module][side] = entry
    return sides


def _place(file: Path, name: str, config: AdapterConfig) -> tuple[str, str]:
    """The module that a tensor is for, and which of its tensors it is."""
    if name.startswith(PREFIX):
        for ending, side in _SIDES.items():
            if name.endswith(ending) and (side != "bias" or config.biases != "none"):
                return _module(name[len(PREFIX) : -len(ending)], config), side
        module, _, leaf = name[len(PREFIX) :].rpartition(".")
        if (leaf in ("weight", "bias") and config.saves(module)) or (leaf == "bias" and config.biases == "all"):
            return module, leaf
    for part, reason in _REFUSED.items():
        if part in name:
            raise UnsupportedError(f"{file}: {name}: {reason}", param=PARAM)
    raise CheckpointError(f"{file}: {name} is no tensor of a LoRA adapter as PEFT names them", param=PARAM)


def _module(name: str, config: AdapterConfig) -> str:
    """The module of this name in the file, where it is one; of a parameter of experts the parameter's own name. PEFT
    gives the last of them the name of their module, and the one before `.base_layer` behind it (its ParamWrapper)."""
    experts = name.removesuffix(_INNER)
    if not config.expert_parts or not experts.endswith(_EXPERTS):
        return name
    part = config.expert_parts[-1 if experts == name else 0]
    return f"{experts}.{part}"


def _entry(
    file: Path, module: str, sides: Mapping[str, TensorEntry], config: AdapterConfig, max_rank: int
) -> LowRankEntry:
    found = {side.removeprefix("table_"): entry for side, entry in sides.items() if side in _PAIRS}
    is_table = any(side.startswith("table_") for side in sides)
    if found.keys() != {"first", "second"} or len(found) < sum(side in _PAIRS for side in sides):
        kind = "lora_embedding_" if is_table else "lora_"
        missing = f"{kind}{'B' if 'first' in found else 'A'}{'' if is_table else '.weight'}"
        raise CheckpointError(f"{file}: {PREFIX}{module}.{missing} is missing", param=PARAM)
    for side, is_said, setting in (
        ("magnitude", config.has_magnitudes, "use_dora"),
        ("second_bias", config.has_second_biases and not is_table, "lora_bias"),
    ):
        if is_said != (side in sides):
            what = f"{CONFIG_FILE} says {setting}={is_said}, which its tensors do not"
            raise CheckpointError(f"{file}: {module}: {what}", param=PARAM)
    first, second = found["first"], found["second"]
    rank, scale = config.of_module(module)
    num_experts = 0
    if module.endswith(tuple(f"{_EXPERTS}.{part}" for part in config.expert_parts)):
        num_experts = max(1, first.shape[0] // rank)
    ranks = rank * max(1, num_experts)
    if (first.shape[0], second.shape[1]) != (ranks, ranks):
        what = f"lora_A is {list(first.shape)} and lora_B {list(second.shape)}, but {CONFIG_FILE} says rank {rank}"
        raise CheckpointError(f"{file}: {module}: {what}", param=PARAM)
    _check_rank(file, module, rank, max_rank)
    return LowRankEntry(module, first, second, rank, scale, is_table, num_experts)


def _extras(file: Path, module: str, sides: Mapping[str, TensorEntry], max_rank: int) -> ModuleExtras:
    extras = ModuleExtras(**{side: entry for side, entry in sides.items() if side not in _PAIRS})
    if not any(side in sides for side in _PAIRS) and (extras.magnitude or extras.second_bias or extras.base):
        raise CheckpointError(f"{file}: {PREFIX}{module}.lora_A.weight is missing", param=PARAM)
    if extras.weight is not None and extras.weight.shape[0] > max_rank:  # two matrices, of which one is the identity
        what = f"modules_to_save: {module} is held whole, with {extras.weight.shape[0]} outputs"
        why = f"a slot has room for classifiers' heads of max_lora_rank={max_rank} classes, and for no whole table"
        raise UnsupportedError(f"{file}: {what}: {why}", param=PARAM)
    return extras


def _check_rank(file: Path, module: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        what = f"{module} has rank {rank}, more than max_lora_rank={max_rank}"
        raise InvalidRequestError(f"{file}: {what}", param=PARAM)
