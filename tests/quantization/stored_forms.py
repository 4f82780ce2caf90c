"""Tiny quantized checkpoints by name, one or more of every format: `directory`/model, and `directory`/judge beside it,
plain, with the numbers that are stored.

Formats' libraries are imported by those that need them: a GPU machine has none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.quantization.checkpoints import Pack, write
from tests.tiny_models import tiny_model

# A rank of two begins within a group of 16 or 32, and within a block.
LLAMA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "initializer_range": 0.1,
}
LINEAR = r"(_proj|\.w[123]|mqa)\.weight$"  # experts' too


@dataclass(frozen=True, slots=True)
class StoredForm:
    """`rounds`: activations are rounded, or weights by Manta itself: answers are near the judge's, no more."""

    pack: Callable[[], tuple[Pack, Mapping[str, Any]]]  # how a module is packed, and config.json's quantization_config
    rounds: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, source: Path, directory: Path) -> Path:
        """The model's directory."""
        pack, scheme = self.pack()
        return write(source, directory, pack, scheme, LINEAR)


def llama(form: str, **sizes: Any) -> Path:
    """The plain checkpoint for a form."""
    return tiny_model("llama", **{**LLAMA, **FORMS[form].sizes, **sizes})


def _of(test: str, name: str) -> Any:
    return getattr(importlib.import_module(f"tests.quantization.{test}"), name)


def _gptq(**options: Any) -> StoredForm:
    def pack() -> tuple[Pack, Mapping[str, Any]]:
        scheme = {**_of("test_gptq", "SCHEME"), "checkpoint_format": options.get("form", "gptq")}
        scheme |= {"bits": options.get("bits", 4), "group_size": options.get("group", 32)}
        scheme["desc_act"], scheme["sym"] = options.get("act_order", False), options.get("sym", False)
        return _of("test_gptq", "gptq")(**options), scheme

    return StoredForm(pack)


def _awq(group: int) -> StoredForm:
    def pack() -> tuple[Pack, Mapping[str, Any]]:
        return _of("test_awq", "awq")(group), {**_of("test_awq", "SCHEME"), "group_size": group}

    return StoredForm(pack)


def _fp8(name: str, scheme: Mapping[str, Any]) -> StoredForm:
    return StoredForm(lambda: (_of("test_fp8_checkpoint", name), scheme), rounds=True)


def _fp8_tensor() -> StoredForm:
    scheme = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return StoredForm(lambda: (_of("test_fp8_checkpoint", "by_tensor")((1,), True), scheme), rounds=True)


def _compressed(name: str, table: str) -> StoredForm:
    def pack() -> tuple[Pack, Mapping[str, Any]]:
        form, weights, inputs = _of("test_compressed_tensors", table)[name]
        scheme = _of("test_compressed_tensors", "config")(form, group_0=(["Linear"], weights, inputs))
        return _of("test_compressed_tensors", "library")(form, weights, inputs), scheme

    return StoredForm(pack, rounds=table == "ROUNDED" or name.startswith("w8a8"))


def _in_table(test: str, name: str, rounds: bool = False, **sizes: Any) -> StoredForm:
    return StoredForm(lambda: _of(test, "FORMS")[name], rounds, sizes)


def _torchao(name: str) -> StoredForm:
    def pack() -> tuple[Pack, Mapping[str, Any]]:
        scheme = _of("test_torchao", "scheme")
        if name == "nibbles":
            return _of("test_torchao", "nibbles"), scheme(_of("test_torchao", "INT4"))
        config = _of("test_torchao", "CONFIGS")[name]
        return _of("test_torchao", "library")(config), scheme(_of("test_torchao", "config_to_dict")(config))

    return StoredForm(pack, rounds=name in ("int8", "int8-both", "fp8"))


def int4_words(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """compressed-tensors' pack-quantized, symmetric in groups of 32: eight codes above -8 a word, the first lowest."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = padded.abs().amax(2) / 7
    codes = (padded / scale[..., None]).round()
    plain = (codes * scale[..., None]).flatten(1)[:, : weight.shape[1]]
    nibbles = (codes.flatten(1)[:, : weight.shape[1]] + 8).numpy().astype(np.uint32)
    nibbles = np.pad(nibbles, ((0, 0), (0, -nibbles.shape[1] % 8)))
    words = (nibbles.reshape(len(nibbles), -1, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(2, dtype=np.uint32)
    stored = {"weight_packed": torch.from_numpy(words.view(np.int32)), "weight_scale": scale}
    return {**stored, "weight_shape": torch.tensor(weight.shape)}, plain


def int8_rows(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """compressed-tensors' int-quantized, a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def _scheme(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        **{"quant_method": "compressed-tensors", "format": form},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"]},
    }


INT4 = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
INT8_TOKENS = {**INT8, "strategy": "token", "dynamic": True}
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16], "fmt": "e4m3"}
# Those that need no library: a GPU machine runs them too.
PLAIN_FORMS: dict[str, StoredForm] = {
    "gptq-4": _gptq(),
    "gptq-4-act-order": _gptq(act_order=True),
    "gptq-8": _gptq(bits=8, group=-1, sym=True),
    "gptq-3": _gptq(bits=3, form="gptq_v2", act_order=True, sym=True),
    "gptq-2": _gptq(bits=2, group=16),
    "awq": _awq(16),
    "awq-rows": _awq(-1),
    "fp8-block": _fp8("by_block", BLOCK),
    "fp8-output": _fp8("by_output", {"quant_method": "fbgemm_fp8"}),
    "fp8-tensor": _fp8_tensor(),
    "w4-words": StoredForm(lambda: (int4_words, _scheme("pack-quantized", INT4, None))),
    "w8a8-rows": StoredForm(lambda: (int8_rows, _scheme("int-quantized", INT8, INT8_TOKENS)), rounds=True),
    "squeezellm": StoredForm(lambda: (_of("test_squeezellm", "pack"), _of("test_squeezellm", "SCHEME"))),
}
BITS_AND_BYTES = {"hidden_size": 128, "intermediate_size": 192}
FORMS: dict[str, StoredForm] = {
    **PLAIN_FORMS,
    **{
        f"ct-{name}": _compressed(name, "FORMS")
        for name in [
            *(f"w{bits}a16-{kind}" for bits in range(2, 9) for kind in ("group", "asym", "channel")),
            *("w4a16-tensor", "w4a8", "w8a16-bytes", "w8a8-asym-inputs"),
            *("nvfp4", "nvfp4-inputs", "mxfp4", "mxfp8", "fp8a16-channel"),
        ]
    },
    **{
        f"ct-{name}": _compressed(name, "ROUNDED")
        for name in ("w8a8", "w8a8-tensor", "fp8-tensor", "fp8-tensor-dynamic", "fp8-channel", "fp8-block")
    },
    **{
        f"bnb-{name}": _in_table("test_bitsandbytes", name, name == "int8", **BITS_AND_BYTES)
        for name in ("nf4", "nf4-nested", "fp4", "int8")
    },
    **{
        f"modelopt-{name}": _in_table("test_modelopt", name, name not in ("nvfp4", "mxfp8"))
        for name in ("nvfp4", "fp8-static", "fp8-dynamic", "fp8-rows", "fp8-blocks", "mxfp8", "mixed")
    },
    **{
        f"auto-round-{name}": _in_table("test_auto_round", name, name == "fp8", intermediate_size=128)
        for name in ("default", "auto_gptq", "auto_round", "auto_awq", "fp8")
    },
    **{
        f"quark-{name}": _in_table("test_quark", name, name.startswith(("fp8", "int8", "mixed")), intermediate_size=128)
        for name in ("int4", "uint4-in-order", "mxfp4", "nvfp4", "fp8-static", "fp8-rows", "int8-rows", "mixed")
    },
    **{
        f"torchao-{name}": _torchao(name)
        for name in ("int8", "int8-groups", "int8-both", "int4-asym", "int3", "fp8", "nibbles")
    },
}
