"""Weights that were rounded here, in the form of `compressed-tensors`, which vLLM, transformers and Manta load.

The other way round is compressed_tensors.py. What rounds is the method that does so while loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.quantization.bits import pack_bits
from app.quantization.forms import Fp8BlockForm, Fp8RowForm, GroupForm, Int8RowForm, WeightForm
from app.quantization.rounding import to_fp8_blocks, to_fp8_rows, to_int4_groups, to_int8_rows

Tensors = dict[str, torch.Tensor]  # by their names behind the module's
KV_SCHEME: Mapping[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
VERSION = "0.15.0"  # of the library's configuration that is written
_BLOCK = 128


@dataclass(slots=True, frozen=True)
class CompressedForm:
    """Says how the weights of one kind are rounded, described and stored."""

    format: str  # the library's name
    weights: Mapping[str, Any]  # of QuantizationArgs
    inputs: Mapping[str, Any] | None
    round: Callable[[torch.Tensor], WeightForm]
    outputs_per: int = 1  # the number of a module's outputs must be a multiple of it
    inputs_per: int = 1
    part_per: int = 1  # and that of each part of a fused module

    def fits(self, outputs: Sequence[int], inputs: int) -> bool:
        """True if a weight whose parts have so many `outputs` can be stored so, for all who read it."""
        is_aligned = len(outputs) == 1 or not any(size % self.part_per for size in outputs)
        return is_aligned and not sum(outputs) % self.outputs_per and not inputs % self.inputs_per

    def group(self) -> dict[str, Any]:
        """The group of all linear layers, for `config_groups`."""
        inputs = None if self.inputs is None else dict(self.inputs)
        return {"targets": ["Linear"], "weights": dict(self.weights), "input_activations": inputs}

    def tensors(self, weight: torch.Tensor) -> Tensors:
        """Returns what stands for weight [N, K]."""
        form = self.round(weight)
        if isinstance(form, GroupForm):
            shape = torch.tensor(form.codes.shape, dtype=torch.int64)
            packed = pack_bits(form.codes, form.bits)
            return {"weight_packed": packed, "weight_scale": form.scale.contiguous(), "weight_shape": shape}
        assert isinstance(form, Fp8RowForm | Fp8BlockForm | Int8RowForm)
        return {"weight": form.weight, "weight_scale": form.scale}


def compressed_form(name: str, group: int = 128) -> CompressedForm:
    """The form of `quantization` = `name`; `group`: inputs that share a scale in 4 bits."""
    fp8, whole = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
    fixed = {"symmetric": True, "dynamic": False}
    if name == "fp8":
        channel = {**fp8, **fixed, "strategy": "channel"}
        return CompressedForm("float-quantized", channel, _tokens(fp8), to_fp8_rows, 16, 16)
    if name == "fp8_block":
        block = {**fp8, **fixed, "strategy": "block", "block_structure": [_BLOCK, _BLOCK]}
        inputs = {**_tokens(fp8), "strategy": "group", "group_size": _BLOCK}
        return CompressedForm("float-quantized", block, inputs, _to_blocks, 16, _BLOCK, _BLOCK)
    if name == "int8":
        channel = {**whole, **fixed, "strategy": "channel"}
        return CompressedForm("int-quantized", channel, _tokens(whole), to_int8_rows)
    assert name == "w4"
    groups = {"num_bits": 4, "type": "int", **fixed, "strategy": "group", "group_size": group}
    return CompressedForm("pack-quantized", groups, None, lambda weight: to_int4_groups(weight, group), 1, group)


def scheme(form: CompressedForm | None, ignored: Sequence[str], kv_scales: str | None = None) -> dict[str, Any]:
    """`quantization_config` of config.json; no `form`: weights are plain. `ignored`: linear layers that stay as they
    are; `kv_scales`: whether the KV cache has a scale for each "tensor" or each head ("attn_head")."""
    return {
        "quant_method": "compressed-tensors",
        "format": "dense" if form is None else form.format,
        "quantization_status": "compressed",
        "config_groups": {} if form is None else {"group_0": {**form.group(), "format": form.format}},
        "ignore": list(ignored),
        "kv_cache_scheme": None if kv_scales is None else {**KV_SCHEME, "strategy": kv_scales},
        "version": VERSION,
    }


def _to_blocks(weight: torch.Tensor) -> WeightForm:
    return to_fp8_blocks(weight, (_BLOCK, _BLOCK))


def _tokens(kind: Mapping[str, Any]) -> dict[str, Any]:
    return {**kind, "symmetric": True, "dynamic": True, "strategy": "token"}
