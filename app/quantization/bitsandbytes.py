"""Checkpoints of bitsandbytes: 4 bits from a table (NF4, FP4: Dettmers et al., 2023), int8 weights of LLM.int8().

A quantized weight of 4 bits is a run of bytes, the first number in the high half, with the largest magnitude of each
block of neighbours, which may be quantized itself ("nested"). Activations stay as they are, with int8 weights too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.errors import CheckpointError, UnsupportedError
from app.quantization.base import QuantMethod, ReadableTensor, StoredModule, WeightShares
from app.quantization.forms import GroupForm, TableForm, WeightForm

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_UNUSED = ("weight.quant_map", "weight.nested_quant_map", *(_STATE + kind for kind in _KINDS))
_BLOCK = 64
_INT8 = 127.0  # what the largest magnitude of a row became


@dataclass(slots=True, frozen=True)
class Nested:
    """Says how the blocks' magnitudes are quantized, in blocks of their own."""

    block: int
    count: int  # of such blocks
    offset: float
    table: tuple[float, ...]
    first: int  # row of the checkpoint's tensor at which the weight begins


@dataclass(slots=True, frozen=True)
class Bits4(QuantMethod):
    """One weight, or several that are alike."""

    dtype: torch.dtype
    num_inputs: int  # K of the whole layer
    block: int
    table: tuple[float, ...]
    nested: Nested | None = None

    unused: tuple[str, ...] = _UNUSED

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """Two numbers a byte; a magnitude for each block, which lies within a row."""
        blocks = Dim("output"), Dim("input", self.block)
        weight = Leaf("weight", torch.uint8, (Dim("output"), Dim("input", 2)), any_shape=True)
        if self.nested is None:
            return weight, Leaf("weight.absmax", torch.float32, blocks, any_shape=True)
        counts = Dim("part"), Dim("unit", entries=self.nested.count)
        return (
            weight,
            Leaf("weight.absmax", torch.uint8, blocks, any_shape=True),
            Leaf("weight.nested_absmax", torch.float32, counts),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        packed, absmax = stored["weight"], stored["weight.absmax"]
        codes = torch.stack((packed >> 4, packed & 15), dim=2).flatten(1)
        if self.nested is not None:
            absmax = self._magnitudes(self.nested, absmax, stored["weight.nested_absmax"], shares)
        scale, group = shares.spread(absmax, 1, Dim("input", self.block))
        table = torch.tensor(self.table, device=codes.device)
        return TableForm(shares.own(codes, 1, Dim("input", 2)), table, scale, group, self.dtype)

    def _magnitudes(
        self, nested: Nested, codes: torch.Tensor, scales: torch.Tensor, shares: WeightShares
    ) -> torch.Tensor:
        """Magnitudes of this rank's codes [N, blocks of a row], fp32. Blocks run over rows of the whole weight."""
        in_row = self.num_inputs // self.block
        first = shares.inputs.start // self.block
        columns = torch.arange(first, first + codes.shape[1], device=codes.device)
        of_parts = []
        for number, share in enumerate(shares.outputs):
            rows = torch.arange(share.size, device=codes.device) + (share.start + nested.first)
            places = (rows.unsqueeze(1) * in_row + columns) // nested.block
            of_parts.append(scales[number][places])
        table = torch.tensor(nested.table, device=codes.device)
        return table[codes.int()] * torch.cat(of_parts) + nested.offset


@dataclass(slots=True, frozen=True)
class Int8(QuantMethod):
    """Rows of int8 beside their largest magnitudes."""

    dtype: torch.dtype

    unused: tuple[str, ...] = ("weight_format",)

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """The weight, and a magnitude for each row."""
        return (
            Leaf("weight", torch.int8, (Dim("output"), Dim("input"))),
            Leaf("SCB", torch.float32, (Dim("output"),)),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        codes = stored["weight"].view(torch.uint8) ^ 128  # from -128 to 0
        scale = stored["SCB"].unsqueeze(1) / _INT8
        return GroupForm(codes, scale, shares.num_inputs, 8, self.dtype)


@dataclass(slots=True, frozen=True)
class BitsAndBytes(QuantMethod):
    """A whole checkpoint: what lies there says which layers are quantized, and how."""

    is_4bit: bool
    skipped: tuple[str, ...] = ("lm_head",)  # where there are no tensors to look at

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """CheckpointError names what is missing or no state of a weight."""
        if module.is_plain or module.kind == "embedding":
            return None
        if module.tensors is None:
            return self._expected(module)
        weight = module.tensors.get("weight")
        states = [name for name in module.tensors if name.startswith(_STATE)]
        if states:
            return _bits4(module, module.tensors, states[0])
        if "SCB" in module.tensors:
            return _int8(module, module.tensors)
        if weight is not None and not weight.dtype.is_floating_point:
            lacking = _STATE + "nf4" if weight.dtype == torch.uint8 else "SCB"
            raise CheckpointError(f"the checkpoint lacks {module.name}.{lacking}", param="model")
        return None

    def _expected(self, module: StoredModule) -> QuantMethod | None:
        """The method of random weights."""
        if module.kind == "head" or any(name in module.name.split(".") for name in self.skipped):
            return None
        if not self.is_4bit:
            return Int8(module.dtype)
        return Bits4(module.dtype, module.num_inputs, _BLOCK, tuple(code / 7.5 - 1 for code in range(16)))

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError where weights lie in bytes of another type."""
        is_4bit = bool(scheme.get("load_in_4bit", scheme.get("_load_in_4bit", False)))
        storage = scheme.get("bnb_4bit_quant_storage") or "uint8"
        if is_4bit and storage != "uint8":
            raise UnsupportedError(f"bitsandbytes: bnb_4bit_quant_storage={storage} is not supported", param="model")
        skipped = scheme.get("llm_int8_skip_modules") or ("lm_head",)
        return cls(is_4bit, tuple(map(str, skipped)))


def _int8(module: StoredModule, tensors: Mapping[str, ReadableTensor]) -> QuantMethod:
    order = tensors.get("weight_format")
    if order is not None and bool(order.whole().any()):
        found = order.whole().tolist()
        raise UnsupportedError(
            f"bitsandbytes: {module.name}.weight_format is {found}; only rows (0) are read", param="model"
        )
    return Int8(module.dtype)


def _bits4(module: StoredModule, tensors: Mapping[str, ReadableTensor], name: str) -> Bits4:
    state, kind = _state(module, tensors[name], name), name.removeprefix(_STATE)
    if kind not in _KINDS:
        raise UnsupportedError(f"bitsandbytes: {module.name}.{name}: only nf4 and fp4 are read", param="model")
    shape, block = [module.num_outputs, module.num_inputs], state.get("blocksize")
    if state.get("shape") != shape:
        raise CheckpointError(
            f"{module.name}.{name} says shape {state.get('shape')}, the model expects {shape}", param="model"
        )
    if not isinstance(block, int) or block < 2 or module.num_inputs % block:
        raise UnsupportedError(
            f"bitsandbytes: {module.name} has {module.num_inputs} inputs, which are no blocks of {block}",
            param="model",
        )
    table = _table(module, tensors, "weight.quant_map", 16)
    return Bits4(module.dtype, module.num_inputs, block, table, _nested(module, tensors, name, state, block))


def _nested(
    module: StoredModule, tensors: Mapping[str, ReadableTensor], name: str, state: Mapping[str, Any], block: int
) -> Nested | None:
    if "nested_blocksize" not in state:
        return None
    size, offset = state["nested_blocksize"], state.get("nested_offset")
    if not isinstance(size, int) or size < 1 or not isinstance(offset, int | float) or not isfinite(offset):
        raise CheckpointError(f"{module.name}.{name}: nested blocks of {size} with the offset {offset}", param="model")
    count = -(-module.num_outputs * module.num_inputs // block // size)
    table = _table(module, tensors, "weight.nested_quant_map", 256)
    return Nested(size, count, float(offset), table, module.first_output)


def _state(module: StoredModule, tensor: ReadableTensor, name: str) -> Mapping[str, Any]:
    """The object that lies in a tensor of bytes."""
    try:
        state = json.loads(bytes(tensor.whole().to(torch.uint8).flatten().tolist()))
        if not isinstance(state, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise CheckpointError(f"{module.name}.{name} is no state of a weight: {error}", param="model") from None
    return state


def _table(module: StoredModule, tensors: Mapping[str, ReadableTensor], name: str, size: int) -> tuple[float, ...]:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != (size,):
        what = "is missing" if found is None else f"has shape {list(found.shape)}, not [{size}]"
        raise CheckpointError(f"{module.name}.{name} {what}", param="model")
    return tuple(found.whole().float().tolist())
