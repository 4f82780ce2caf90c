"""XLM-RoBERTa as Jina publishes it (Jina Embeddings v3, Jina Reranker v2): names and fused tensors of its own, rotary
or learned positions, and in v3 an adapter for each task beside every weight.

One task is served, whose adapter is added to the weights when they are loaded: config.json's `jina_task` (with
`--hf-overrides`). Where nobody says, the weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from app.checkpoints.adapters.adapter_files import FLOATS
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.safetensors_header import SafetensorsHeader, TensorEntry
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.entry_tensor import read_entry
from app.checkpoints.tensors.tensor_view import computed
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext
from app.models.encoder import EncoderClassifier, EncoderSettings
from app.models.families.nomic_bert import RotaryBertModel

_ADAPTED = ".parametrizations.weight."


@dataclass(slots=True, frozen=True)
class _Task:
    """The place of an adapter among the others, and by how much its product counts."""

    place: int
    scale: float

    @classmethod
    def of(cls, info: ModelInfo) -> _Task | None:
        """The one that config.json names; None: none. UnsupportedError where the model has no such task."""
        hf = info.hf_config
        if (given := hf.get("jina_task")) is None:
            return None
        tasks = hf.get("lora_adaptations") or []
        if given not in tasks:
            known = ", ".join(tasks)[:200] or "none"
            raise UnsupportedError(f"jina_task={given!r:.80}: known are {known}", param="model")
        return cls(tasks.index(given), float(hf.get("lora_alpha", 1)) / int(hf.get("lora_rank", 4)))


class JinaXLMRobertaModel(RotaryBertModel):
    """The encoder without a head."""

    prefix = "roberta."
    theta = 10_000.0

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self._task = _Task.of(info)

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """Rotary positions where config.json says so, else learned ones."""
        kind = info.hf_config.get("position_embedding_type", "absolute")
        if kind != "rotary":
            return EncoderSettings.from_info(info)
        return super().settings(replace(info, hf_config={**info.hf_config, "position_embedding_type": "absolute"}))

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """A weight with the adapter of the task, whose matrices lie beside it."""
        module, found, part = name.partition(_ADAPTED)
        if not found:
            yield from super().own_tensors(name, tensor)
        elif part == "original":
            change = None if self._task is None else _Change.of(name, tensor, self._task)
            for own, one in super().own_tensors(f"{module}.weight", tensor):
                if change is not None:
                    skipped = one.mapped.storage_offset() - tensor.mapped.storage_offset()
                    one = computed(one, partial(change.added, first_row=skipped // tensor.shape[1]))
                yield own, one


class JinaXLMRobertaForSequenceClassification(EncoderClassifier, JinaXLMRobertaModel):
    """out_proj(tanh(dense(first token)))."""

    head_names = ("classifier.dense.", "classifier.out_proj.")


@lru_cache(1)
def _entries(file: Path, changed_ns: int) -> Mapping[str, TensorEntry]:
    """The tensors of a file as it is since then; each weight of the model asks for its own."""
    return SafetensorsHeader.read(file).tensors


@dataclass(slots=True, frozen=True)
class _Change:
    """The product of two matrices [n, rows, r] and [n, r, columns] of n tasks, of which one is added to a weight."""

    file: Path
    left: TensorEntry
    right: TensorEntry
    task: _Task

    @classmethod
    def of(cls, name: str, tensor: StoredTensor, task: _Task) -> _Change:
        """That of a weight. CheckpointError where the file holds none of its shape."""
        file, stem = tensor.file, name.removesuffix("original")
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{file}: adapters of tasks are read from safetensors only", param="model")
        entries = _entries(file, file.stat().st_mtime_ns)
        # A table's rows are the first matrix's, a layer's the second one's.
        sides = "AB" if "embeddings." in name else "BA"
        left, right = (entries.get(f"{stem}0.lora_{side}") for side in sides)
        if left is None or right is None or any(entry.dtype not in FLOATS for entry in (left, right)):
            raise CheckpointError(f"{file} holds no adapter of floating numbers for {name}", param="model")
        is_one = len(left.shape) == len(right.shape) == 3 and left.shape[0] == right.shape[0] > task.place
        if not is_one or left.shape[2] != right.shape[1] or (left.shape[1], right.shape[2]) != tensor.shape:
            raise CheckpointError(f"{file}: the adapter of {name} has the shape of another weight", param="model")
        return cls(file, left, right, task)

    def added(self, weight: torch.Tensor, first_row: int) -> torch.Tensor:
        """Rows of the weight, from `first_row` on, with what is added to them."""
        if weight.is_meta:  # asked for its shape alone
            return weight
        left = self._read(self.left)[first_row : first_row + len(weight)]
        return torch.addmm(weight.float(), left, self._read(self.right), alpha=self.task.scale).to(weight.dtype)

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        size = (entry.end - entry.begin) // entry.shape[0]
        begin = entry.begin + self.task.place * size
        return read_entry(self.file, replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size)).float()
