"""What `quantization_config` says in another form than methods read is refused by the field's name, before a model is
made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from app.errors import CheckpointError, UnsupportedError
from app.quantization import select_quantization
from app.quantization.base import StoredModule
from app.quantization.config_fields import named_errors
from tests.quantization.checkpoints import Shown

CPU = torch.device("cpu")
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(targets: Any = ("Linear",), **weights: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": {**INT4, **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, **more}


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (gptq(bits="4"), r"quantization_config\.bits is '4', not a whole number"),
        (gptq(bits=True), r"quantization_config\.bits is True, not a whole number"),
        (gptq(group_size="x"), r"quantization_config\.group_size is 'x', not a whole number"),
        (gptq(dynamic={"-:*gate": {}}), r"quantization_config\.dynamic: '\*gate' is no pattern: nothing to repeat"),
        (gptq(dynamic={"+:gate": 8}), r"quantization_config\.dynamic is .*, not an object of objects"),
        (compressed(["re:*gate"]), r"config_groups\.g\.targets: '\*gate' is no pattern"),
        (compressed(num_bits="4"), r"quantization_config\.config_groups\.g\.weights\.num_bits is '4', not a whole"),
        (compressed(block_structure="axb"), r"weights\.block_structure is 'axb', not two sizes"),
        ({**compressed(), "ignore": "lm_head"}, r"quantization_config\.ignore is 'lm_head', not a list of names"),
        ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size is 128, not two sizes"),
        ({"quant_method": "fp8", "weight_block_size": ["a", 1]}, r"weight_block_size is \['a', 1\], not two sizes"),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, r"modules_to_not_convert is 'lm_head', not a"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "awq: checkpoint_format=gemv; take a checkpoint of"),
        ({"quant_method": "auto-round", "extra_config": {"*gate": {"bits": 8}}}, r"extra_config: '\*gate' is no patt"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": "x"}, r"group_size is 'x', not a whole"),
        ({"quant_method": "modelopt", "quantized_layers": {"a": "FP8"}}, r"quantized_layers is .*, not an object of"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": 7}}}, None),
        ({"quant_method": "awq", "version": 7}, "awq: version=7"),
        (gptq(dynamic="x"), "gptq: dynamic='x', not an object of rules"),
        (gptq(group_size=10**30), r"quantization_config\.group_size is 1000.*, not a whole number"),
        (gptq(desc_act="false"), r"quantization_config\.desc_act is 'false', not true or false"),
        (compressed(symmetric="false"), r"weights\.symmetric is 'false', not true or false"),
        (compressed(num_bits=None, group_size=None, strategy="channel"), None),
        ({**compressed(), "format": "zip"}, "compressed-tensors: g: format='zip' is not read"),
        ({**compressed(), "config_groups": {"g": None}}, r"config_groups is .*, not an object of objects"),
        ({"quant_method": "quark", "layer_quant_config": {"a": None}}, r"layer_quant_config is .*, not an object"),
        ({**compressed(), "kv_cache_scheme": "fp8"}, "kv_cache_scheme 'fp8' of the checkpoint is not supported"),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": [1]}, r"ModelOpt: group_size=\[1\]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": -1}, "ModelOpt: group_size=-1"),
        ({"quant_method": "gguf", "modules": {"a": ["Q4_K"]}}, "GGUF: quantization_config names no types"),
        ({"quant_method": "auto-round", "bits": None}, None),
        ({"quant_method": "quark", "exclude": ["re:*head"]}, r"exclude: '\*head' is no pattern"),
        ({"quant_method": "quark", "layer_quant_config": {"a": 8}}, "layer_quant_config is .*, not an object of"),
        ({"quant_method": "quark", "global_quant_config": {"weight": "fp8"}}, "weight is 'fp8', not an object or"),
        ({"quant_method": "quark", "export": {"kv_cache_group": "*k"}}, "kv_cache_group is .*, not a list of names"),
    ],
)
def test_a_field_of_another_type_is_named(scheme: dict[str, Any], message: str | None) -> None:
    if message is None:
        method, _ = select_quantization(None, scheme, CPU, torch.float32)
        method.method_of(StoredModule("m", "linear", torch.float32, 256, 256))
        return
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        select_quantization(None, scheme, CPU, torch.float32)


def test_what_nobody_foresaw_says_where_it_was() -> None:
    unforeseen = r"model\.norm cannot be read .*\(ValueError: invalid literal"
    with pytest.raises(UnsupportedError, match=unforeseen), named_errors("model.norm"):
        int("x")
    with pytest.raises(CheckpointError, match="lacks"), named_errors("model.norm"):
        raise CheckpointError("it lacks one", param="model")


PLAIN = {"weight": torch.zeros(256, 256, dtype=torch.float16)}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}


def chosen(scheme: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None, name: str = "model.gate") -> Any:
    """The method of a module [256, 256] of a checkpoint."""
    method, _ = select_quantization(None, scheme, CPU, torch.float32)
    shown = None if tensors is None else {leaf: Shown(tensor) for leaf, tensor in tensors.items()}
    return method.method_of(StoredModule(name, "linear", torch.float32, 256, 256, tensors=shown))


@pytest.mark.parametrize(
    "scheme",
    [
        *(compressed(), gptq(), ROUND),
        *(
            {"quant_method": name}
            for name in ("awq", "bitsandbytes", "fbgemm_fp8", "fp8", "quark", "squeezellm", "torchao")
        ),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "gguf", "modules": {"model.gate": "Q4_K"}},
    ],
    ids=lambda scheme: scheme["quant_method"],
)
def test_what_lies_there_plain_is_plain_whatever_lists_say(scheme: dict[str, Any]) -> None:
    assert chosen(scheme, PLAIN) is None


def test_rules_by_name() -> None:
    """AutoRound's own name before patterns, of which the first that is found counts; ModelOpt's last part of a name."""
    extra = {"model.down": {"bits": 8}, r"down$": {"bits": 2}, "mod": {"bits": 3}}
    scheme = {**ROUND, "extra_config": extra, "packing_format": "auto_round:gptq"}
    found = [chosen(scheme, None, name) for name in ("model.down", "a.down", "model.gate", "gate")]
    assert [method.bits for method in found] == [8, 2, 3, 4]
    assert all(method.zeros_less_one for method in found)
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    assert chosen(modelopt, None, "language_model.lm_head") is None
    assert chosen(modelopt, None, "language_model.head") is not None
