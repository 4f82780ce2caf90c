"""Jina Embeddings v5 for text (2026), small and nano: Qwen3, or EuroBERT where tokens see both ways, with the adapter
of a task.

One task is served, whose adapter is added to the weights when they are loaded: config.json's `jina_task` (with
`--hf-overrides`), retrieval where nobody says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path

import torch

from app.checkpoints.adapters.adapter_files import WEIGHTS_FILE, AdapterFiles, LowRankEntry
from app.checkpoints.adapters.task_adapter import task_adapter
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.entry_tensor import read_entry
from app.checkpoints.tensors.tensor_view import computed
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext
from app.models.decoder import CausalLM
from app.models.decoder_pooling import DecoderForPooling
from app.models.families.llama import LlamaForCausalLM
from app.models.families.qwen3 import Qwen3ForCausalLM

MOST_RANK = 1024
_MODULES = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")


class JinaEmbeddingsV5(DecoderForPooling):
    """The decoder of either kind."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        adapter = task_adapter(info.hf_config)
        assert adapter is not None, "another model type"
        self._directory, self._adapter = info.directory, adapter

    @staticmethod
    def family_of(info: ModelInfo) -> type[CausalLM]:
        """See DecoderForPooling."""
        return Qwen3ForCausalLM if info.is_causal else LlamaForCausalLM

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The family's, the adapter added to those that it changes: the one beside them, where they are an update's."""
        module = name.removeprefix("model.").removesuffix(".weight")
        if name.endswith(".weight") and _MODULES.fullmatch(module):
            files = self._files(tensor.file.parent if tensor.file.is_file() else self._directory)
            if (entry := files.modules.get(module)) is not None:
                if tensor.shape != (entry.second.shape[0], entry.first.shape[1]):
                    what = f"has the shape of another module than {name} {list(tensor.shape)}"
                    raise CheckpointError(f"{files.directory}: {module} {what}", param="model")
                tensor = computed(tensor, partial(_changed, file=files.directory / WEIGHTS_FILE, entry=entry))
        return super().own_tensors(name, tensor)

    def _files(self, directory: Path) -> AdapterFiles:
        """The adapter in a directory, unread; UnsupportedError names a module that is changed in another way."""
        file = directory / self._adapter / WEIGHTS_FILE
        files = _read(file.parent, file.stat().st_mtime_ns if file.is_file() else 0)
        layers = len(self.model.layers)
        odd = [*files.extras, *(one for one in files.modules if not _is_changed(one, layers))]
        if odd:
            raise UnsupportedError(f"{files.directory} changes {odd[0]!r:.120}", param="model")
        return files


@lru_cache(1)
def _read(directory: Path, changed_ns: int) -> AdapterFiles:
    """The adapter as it is since then; each tensor of the model asks for it."""
    return AdapterFiles.read(directory, MOST_RANK)


def _is_changed(module: str, num_layers: int) -> bool:
    return _MODULES.fullmatch(module) is not None and int(module.split(".")[1]) < num_layers


def _changed(weight: torch.Tensor, file: Path, entry: LowRankEntry) -> torch.Tensor:
    """A module's weight with its two matrices, which are read now: none of the adapter is kept."""
    if weight.is_meta:  # asked for its shape alone
        return weight
    first, second = (read_entry(file, one) for one in (entry.first, entry.second))
    return torch.addmm(weight.float(), second.float(), first.float(), alpha=entry.scale).to(weight.dtype)
