"""Names and tensors of a checkpoint as transformers' modules hold them.

transformers renames what older checkpoints hold, and stacks experts that are stored one by one. The same is done here
tensor by tensor, so that our reader still reads each by itself: a stacked parameter is filled expert by expert, and a
tensor that is stored stacked comes in its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError

_STACKS = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


class CheckpointNames:
    """Made before the model's layers are exchanged."""

    def __init__(self, hf: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(hf)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._base = hf.base_model_prefix
        self._held = dict(hf.state_dict())
        self._ignored = [re.compile(pattern) for pattern in hf._keys_to_ignore_on_load_unexpected or ()]
        self._tied = {name for name, source in hf.all_tied_weights_keys.items() if name != source}
        self._stacks = {name: size for name in self._held if (size := self._matrices(name))}

    def matrices(self, name: str) -> int:
        """Counts the matrices that lie one below the other in each expert of a stacked parameter; 0: it is none."""
        return self._stacks.get(name, 0)

    def own(self, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
        """A tensor of the checkpoint under the modules' names: itself, its parts, or nothing where it has no use."""
        own = self.own_name(name)
        if own is not None and own in self._stacks:
            yield from self._unstacked(own, tensor)
        elif own is not None:
            yield own, tensor

    def own_name(self, name: str) -> str | None:
        """The modules' name of a tensor, or of the part of a stacked parameter that it is; None: it has no use."""
        own, pattern = self._renamed(name)
        if own in self._tied or (own not in self._held and any(ignored.search(own) for ignored in self._ignored)):
            return None
        if own in self._stacks and pattern is not None:
            return part_name(own, *self._place(name, pattern))
        if pattern is not None and own in self._held:
            raise UnsupportedError(f"transformers converts {name} of this checkpoint, which we cannot", param="model")
        return own

    def _renamed(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        own, pattern = rename_source_key(name, self._renamings, self._converters, self._base, self._held)
        if own not in self._held and name in self._held:
            return name, None
        return own, pattern

    def _matrices(self, name: str) -> int:
        for converter in self._converters:
            kinds = [type(operation).__name__ for operation in converter.operations]
            if kinds in _STACKS and len(converter.target_patterns) == 1 and converter.target_patterns[0] in name:
                return len(converter.source_patterns)
        return 0

    def _place(self, name: str, pattern: str) -> tuple[int, int]:
        """The expert that a stored tensor belongs to, and which of its matrices it is."""
        from transformers.core_model_loading import rename_source_key

        renamed, _ = rename_source_key(name, self._renamings, [])
        found = re.search(pattern.replace("*.", r"(\d+)\."), renamed)
        if found is None or not found.groups():
            raise UnsupportedError(f"{name} is converted by {pattern!r}, which names no expert", param="model")
        converter = next(entry for entry in self._converters if pattern in entry.source_patterns)
        return int(found[1]), converter.source_patterns.index(pattern)

    def _unstacked(self, own: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
        count = self._stacks[own]
        for expert in range(tensor.shape[0]):
            for matrix, rows in enumerate(tensor.mapped[expert].chunk(count)):
                yield part_name(own, expert, matrix), _view(tensor, rows)


def part_name(name: str, expert: int, matrix: int) -> str:
    """Returns what the loader asks for, of a parameter that is filled by `part_ids`."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.{expert}.{matrix}.{leaf}"


def part_ids(name: str, experts: int, matrices: int) -> tuple[str, ...]:
    """The parts of a stacked parameter (WeightSpec.parts)."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return tuple(f"{module}.{expert}.{matrix}" for expert in range(experts) for matrix in range(matrices))


def _view(source: StoredTensor, part: torch.Tensor) -> StoredTensor:
    skipped = (part.storage_offset() - source.mapped.storage_offset()) * part.itemsize
    return replace(source, mapped=part, begin=source.begin + int(skipped))
