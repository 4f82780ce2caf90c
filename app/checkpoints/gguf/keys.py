"""Values of a GGUF file's metadata, each of the type that its key is for: CheckpointError names one that is another."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

from app.errors import CheckpointError, UnsupportedError

ValueT = TypeVar("ValueT")
_LARGEST = 1 << 31


@dataclass(slots=True, frozen=True)
class Keys:
    """Those of the file's architecture, by what stands behind its name."""

    metadata: Mapping[str, Any]
    zeros_are_none: bool = False  # of lists that have an entry for each layer

    def size(self, key: str) -> int | None:
        """A whole number of at least 0; None: there is none."""
        value = self._value(key)
        if value is not None and (not _is_whole(value) or not 0 <= value < _LARGEST):
            raise self._refuse(key, value, "a size")
        return value  # type: ignore[no-any-return]

    def needed(self, key: str) -> int:
        """A size that must be there, and be above 0."""
        return self.must(key, self.size(key))

    def number(self, key: str) -> float | None:
        """A finite number of at least 0; None: there is none."""
        value = self._value(key)
        if value is None:
            return None
        if not (_is_whole(value) or isinstance(value, float)) or not isfinite(value) or value < 0:
            raise self._refuse(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """Yes or no; None: there is none."""
        value = self._value(key)
        if value is not None and not isinstance(value, bool):
            raise self._refuse(key, value, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A text; None: there is none."""
        value = self._value(key)
        if value is not None and not isinstance(value, str):
            raise self._refuse(key, value, "a text")
        return value

    def num_layers(self) -> int:
        """Layers of the model, less those behind them that only predict further tokens."""
        count, further = self.needed("block_count"), self.size("nextn_predict_layers") or 0
        if further >= count:
            raise CheckpointError(f"GGUF: nextn_predict_layers is {further} of {count} layers", param="model")
        return count - further

    def of_layers(self, key: str) -> list[int]:
        """Whole numbers of at least 0, one of each layer of the model; CheckpointError where there are not as many."""
        values, total = self.metadata.get(self._name(key)), self.size("block_count")
        if not isinstance(values, list | array) or not all(_is_whole(one) and one >= 0 for one in values):
            values = []
        if len(values) != total:
            raise CheckpointError(f"GGUF: {key} has {len(values)} entries for {total} layers", param="model")
        return list(values[: self.num_layers()])

    def must(self, key: str, value: ValueT | None) -> ValueT:
        """The value; CheckpointError where there is none, or it is 0."""
        if value is None:
            raise CheckpointError(f"GGUF: the metadata lack {self._name(key)}", param="model")
        if not value:
            raise self._refuse(key, value, "a size")
        return value

    def _value(self, key: str) -> Any:
        """UnsupportedError where layers differ, or there is none in the list."""
        value = self.metadata.get(self._name(key))
        if not isinstance(value, list | array):
            return value
        if any(isinstance(one, list | array) for one in value):
            raise self._refuse(key, value[:1], "a number of each layer")
        found = {one for one in value if one or not self.zeros_are_none}
        found = found or set(value)  # none of any layer
        if len(found) != 1:
            few = list(value[:8])
            raise UnsupportedError(f"GGUF: {self._name(key)} differs from layer to layer: {few}", param="model")
        return found.pop()

    def _name(self, key: str) -> str:
        return f"{self.metadata['general.architecture']}.{key}"

    def _refuse(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"GGUF: {self._name(key)} is {value!r}, not {expected}", param="model")


def token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    """The special token `name`; None where there is none or, as llama.cpp takes it, none of `size` tokens."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and _is_whole(value) and 0 <= value < size else None


def texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts; empty: there is none."""
    value = metadata.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise CheckpointError(f"GGUF: {key} is no list of texts", param="model")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
