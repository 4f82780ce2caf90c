"""Quantized tensors of a GGUF file, each of a type of its own: blocks of a row, as the file has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from app.checkpoints.gguf.blocks import BLOCK_TYPES
from app.checkpoints.tensors.leaf import Dim, Leaf
from app.errors import CheckpointError
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.forms import GroupForm, TableForm, WeightForm
from app.quantization.gguf_blocks import unpack_blocks

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(slots=True, frozen=True)
class GgufBlocks(QuantMethod):
    """One weight of the type `name`."""

    dtype: torch.dtype
    name: str

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """Bytes [N, blocks of a row, bytes of a block]."""
        block = BLOCK_TYPES[self.name]
        dims = Dim("output"), Dim("input", block.size), Dim("unit", entries=block.num_bytes)
        return (Leaf("weight", torch.uint8, dims),)

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        found, blocks = unpack_blocks(self.name, stored["weight"]), Dim("input", BLOCK_TYPES[self.name].size)
        codes = shares.own(found.codes, 1, blocks)
        size = found.codes.shape[1] // found.scale.shape[1]
        skipped = shares.inputs.start % blocks.per // size  # groups that were read of the block before the share
        scale, group = shares.spread(found.scale[:, skipped:], 1, Dim("input", size))
        if found.table is not None:
            return TableForm(codes, found.table, scale, group, self.dtype)
        offset = None
        if found.offset is not None:
            offset, _ = shares.spread(found.offset[:, skipped:], 1, Dim("input", size))
        return GroupForm(codes, scale, group, found.bits, self.dtype, offset)


@dataclass(slots=True, frozen=True)
class GgufMethod(QuantMethod):
    """A whole file: linear layers, the output head and the embedding."""

    types: Mapping[str, str]  # by the module's name in a checkpoint of transformers, or that of all experts of a layer

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """See QuantMethod."""
        of_all = self.types.get(_EXPERT.sub(".experts.", module.name))
        name = None if module.is_plain else self.types.get(module.name, of_all)
        return None if name is None else GgufBlocks(module.dtype, name)

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """CheckpointError where the scheme is none that a GGUF file's description has."""
        types = scheme.get("modules")
        if not isinstance(types, Mapping) or not all(isinstance(t, str) and t in BLOCK_TYPES for t in types.values()):
            raise CheckpointError("GGUF: quantization_config names no types; give the GGUF file itself", param="model")
        return cls(dict(types))
