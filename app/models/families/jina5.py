"""Jina Embeddings v5 for text (2026), small and nano: Qwen3, or EuroBERT where tokens see both ways, with the adapter
of a task.

One task is served, whose adapter is added to the weights when they are loaded: config.json's `jina_task` (with
`--hf-overrides`), retrieval where nobody says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property, partial

import torch

from app.checkpoints.adapters.adapter_files import AdapterFiles, LowRankEntry
from app.checkpoints.adapters.task_adapter import task_adapter
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.entry_tensor import entry_tensor
from app.checkpoints.tensors.tensor_view import computed
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext
from app.models.decoder import CausalLM
from app.models.decoder_pooling import DecoderForPooling
from app.models.families.llama import LlamaForCausalLM
from app.models.families.qwen3 import Qwen3ForCausalLM

MOST_RANK = 1024
_MODULES = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")
Pair = tuple[torch.Tensor, torch.Tensor, float]  # [r, in], [out, r], and what their product is multiplied by


class JinaEmbeddingsV5(DecoderForPooling):
    """The decoder of either kind."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        adapter = task_adapter(info.hf_config)
        assert adapter is not None, "another model type"
        self._adapter = info.directory / adapter

    @staticmethod
    def family_of(info: ModelInfo) -> type[CausalLM]:
        """See DecoderForPooling."""
        return Qwen3ForCausalLM if info.is_causal else LlamaForCausalLM

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The family's, the adapter added to those that it changes."""
        module = name.removeprefix("model.").removesuffix(".weight")
        if (pair := self._pairs.get(module)) is not None and name.endswith(".weight"):
            if tensor.shape != (pair[1].shape[0], pair[0].shape[1]):
                what = f"has the shape of another module than {name} {list(tensor.shape)}"
                raise CheckpointError(f"{self._adapter}: {module} {what}", param="model")
            tensor = computed(tensor, partial(_changed, pair=pair))
        return super().own_tensors(name, tensor)

    @cached_property
    def _pairs(self) -> Mapping[str, Pair]:
        """The adapter's matrices by module; UnsupportedError names a module that is changed in another way."""
        files = AdapterFiles.read(self._adapter, MOST_RANK)
        layers = len(self.model.layers)
        odd = [*files.extras, *(one for one in files.modules if not _is_changed(one, layers))]
        if odd:
            raise UnsupportedError(f"{self._adapter} changes {odd[0]!r:.120}", param="model")
        content = files.content()
        return {module: _pair(entry, content) for module, entry in files.modules.items()}


def _is_changed(module: str, num_layers: int) -> bool:
    return _MODULES.fullmatch(module) is not None and int(module.split(".")[1]) < num_layers


def _pair(entry: LowRankEntry, content: bytearray) -> Pair:
    return entry_tensor(entry.first, content), entry_tensor(entry.second, content), entry.scale


def _changed(weight: torch.Tensor, pair: Pair) -> torch.Tensor:
    if weight.is_meta:  # asked for its shape alone
        return weight
    first, second, scale = pair
    return torch.addmm(weight.float(), second.float(), first.float(), alpha=scale).to(weight.dtype)
