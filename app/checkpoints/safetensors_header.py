"""The header of a safetensors file: which tensors lie where. Read and checked without the data, torch or numpy (I8).

Format: 8 bytes with the header's length (little endian), the header (JSON), the data without a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.checkpoints.weight_files import checked_name
from app.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_TENSORS = 1 << 20
MOST_DIMS = 32
MOST_NUMBER = (1 << 63) - 1
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(slots=True, frozen=True)
class TensorEntry:
    """One tensor of the file; `begin` and `end` are offsets from the file's first byte."""

    dtype: str  # the format's own name: a key of ITEM_BYTES
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True, frozen=True)
class SafetensorsHeader:
    """Tensors by name, in the order in which they lie, and the file's own remarks."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @classmethod
    def read(cls, file: Path, most_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
        """CheckpointError names a file that is none, is damaged or is shorter than its header says, which has
        `most_bytes` at most."""
        try:
            size = file.stat().st_size
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if size < 8 or length > min(size - 8, most_bytes):
                    raise ValueError(f"it is no safetensors file, or damaged: a header of {length} bytes in {size}")
                entries = json.loads(opened.read(length), object_pairs_hook=_once)
            metadata = _metadata(entries)
            tensors = dict(sorted(_entries(entries, 8 + length), key=_place))
            _check_places(tensors, 8 + length, size)
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"cannot read {file}: {_reason(error)}", param="model") from None
        return cls(tensors, metadata)


def _entries(entries: Mapping[str, Any], base: int) -> Iterator[tuple[str, TensorEntry]]:
    for name, entry in entries.items():
        checked_name(name)
        begin, end = _whole(entry["data_offsets"])
        shape = tuple(_whole(entry["shape"]))
        dtype = entry["dtype"]
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name} has the unknown type {dtype!a:.40}")
        is_sized = min(shape, default=0) >= 0 and math.prod(filter(None, shape)) <= MOST_NUMBER
        if not is_sized or end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name} is {dtype} {list(shape)}, but has {end - begin} bytes")
        yield name, TensorEntry(dtype, shape, base + begin, base + end)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; ValueError where a name stands in it twice, of which readers take the one or the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in an object of its header")
    return found


def _metadata(entries: dict[str, Any]) -> dict[str, str]:
    """Take it out of the header."""
    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if len(entries) > MOST_TENSORS:
        raise ValueError(f"it has {len(entries)} tensors; at most {MOST_TENSORS}")
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("__metadata__ must hold texts by name")
    return metadata


def _whole(numbers: Any) -> list[int]:
    if not isinstance(numbers, list) or len(numbers) > MOST_DIMS:
        raise TypeError(f"{numbers!r:.80} must be a list of at most {MOST_DIMS}")
    if not all(type(number) is int and abs(number) <= MOST_NUMBER for number in numbers):
        raise TypeError(f"{numbers!r:.80} must be whole numbers")
    return numbers


def _place(item: tuple[str, TensorEntry]) -> tuple[int, int]:
    """An empty tensor lies before the one that begins where it does."""
    return item[1].begin, item[1].end


def _check_places(tensors: Mapping[str, TensorEntry], base: int, size: int) -> None:
    """Every byte behind the header belongs to one tensor."""
    at = base
    for name, entry in tensors.items():
        if entry.begin != at:
            raise ValueError(f"{name} begins at byte {entry.begin}, not behind the tensor before it at {at}")
        at = entry.end
    if size < at:
        raise ValueError(f"it ends after {size} bytes of {at}: the copy or download is not complete")
    if size > at:
        raise ValueError(f"{size - at} bytes follow the last tensor")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "it is no safetensors file, or damaged: its header is no JSON"
    if isinstance(error, ArithmeticError | LookupError | TypeError | AttributeError | RecursionError):
        return f"its header is not as the format has it ({error!r})"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
