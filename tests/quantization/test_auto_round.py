"""AutoRound's checkpoints in all its packings, by the packers of those forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.tensors.leaf import Share
from app.errors import CheckpointError, UnsupportedError
from app.kernels.gemm.stored import E2M1
from app.quantization.auto_round import AutoRound
from app.quantization.base import StoredModule, WeightShares
from app.quantization.forms import of_groups
from tests.loading.load_formats.formats import fill
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.quantization.test_awq import awq
from tests.quantization.test_compressed_tensors import FORMS as COMPRESSED
from tests.quantization.test_compressed_tensors import library
from tests.quantization.test_gptq import gptq
from tests.tiny_models import tiny_model

SIZES: dict[str, Any] = {**HEADS, "intermediate_size": 128}
DOWN = "model.layers.0.mlp.down_proj"


def without_index(pack: Pack) -> Pack:
    """AutoRound writes no `g_idx`."""

    def packed(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        found = pack(name, weight)
        return found and ({leaf: x for leaf, x in found[0].items() if leaf != "g_idx"}, found[1])

    return packed


def fp8(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.flatten()}, codes.float() * scale


def scheme(packing: str | None, **more: Any) -> dict[str, Any]:
    named = {} if packing is None else {"packing_format": packing}
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, **named, **more}


FORMS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "default": (without_index(gptq()), scheme(None)),
    "auto_gptq": (without_index(gptq(3)), scheme("auto_round:auto_gptq", bits=3)),
    "auto_round": (without_index(gptq(form="gptq_v2")), scheme("auto_round")),
    "auto_awq": (awq(32), scheme("auto_round:auto_awq")),
    "fp8": (fp8, scheme("auto_round:fp8", bits=8)),
    "fp8_static": (fp8, scheme("auto_round:fp8_static", bits=8)),
    "mxfp4": (library(*COMPRESSED["mxfp4"]), scheme("auto_round:llm_compressor", data_type="mx_fp")),
    "nvfp4": (library(*COMPRESSED["nvfp4"]), scheme("auto_round:llm_compressor", data_type="nv_fp", group_size=16)),
}


def made(form: str, directory: Path) -> Path:
    return write(tiny_model("llama", **SIZES), directory, *FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_has_its_shares(form: str, tmp_path: Path) -> None:
    check_weights(made(form, tmp_path), tp=2)


def test_modules_have_options_of_their_own(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        if name.endswith("k_proj"):
            return None
        return without_index(gptq(8 if re.search("down_proj", name) else 4))(name, weight)

    extra = {
        "model.layers.0.self_attn.k_proj": {"bits": 16},
        "model.layers.1.self_attn.k_proj": {"bits": 16},
        r".*\.down_proj": {"bits": 8},
    }
    check_logits(
        write(tiny_model("llama", **SIZES), tmp_path, pack, scheme("auto_round:auto_gptq", extra_config=extra))
    )


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (f"{DOWN}.scales", None, r"lacks .*down_proj\.scales"),
        (f"{DOWN}.qzeros", lambda x: x[:1], r"qzeros .* has shape \[1, 8\]"),
        (f"{DOWN}.qweight", lambda x: x.float(), r"qweight .* holds float32"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(
    name: str, edit: Callable[[torch.Tensor], torch.Tensor] | None, message: str, tmp_path: Path
) -> None:
    directory = made("default", tmp_path)
    change(directory, name, edit)
    with pytest.raises(CheckpointError, match=message):
        fill(directory)


@pytest.mark.slow  # the library takes seconds to import
@pytest.mark.parametrize(("data_type", "group", "bits"), [("mx_fp", 32, 4), ("nv_fp", 16, 4), ("mx_fp", 32, 8)])
def test_its_own_packer_of_floats(data_type: str, group: int, bits: int) -> None:
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear

    torch.manual_seed(0)
    linear, scale = torch.nn.Linear(128, 64, bias=False), torch.randint(-3, 3, (64, 128 // group)).float()
    whole = {"global_scale": torch.tensor([64.0])} if data_type == "nv_fp" else {}
    numbers = E2M1[torch.randint(16, (64, 128))] * of_groups(scale.exp2(), group, 128) / (64 if whole else 1)
    linear.weight.data.copy_(numbers)
    packed = QuantLinear(bits, group, 128, 64, False, data_type=data_type, act_bits=bits)
    packed.pack(linear, scale.exp2() if whole else scale, **whole)
    options = {"data_type": data_type, "group_size": group, "bits": bits}
    method = AutoRound.of_checkpoint(scheme("auto_round:llm_compressor", **options))
    module = StoredModule("model.layers.0.mlp.down_proj", "linear", torch.float32, 64, 128, tensors=None)
    own = method.method_of(module)
    assert own is not None
    stored = packed.state_dict()
    assert {leaf.name for leaf in own.leaves(torch.float32)} == set(stored) - set(own.unused)
    shares = WeightShares((Share(0, 64, 0, 64),), Share(0, 128, 0, 128))
    torch.testing.assert_close(own.unpack(stored, shares).dequantize(), numbers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_type": "mx_fp", "bits": 8, "group_size": 64}, r"data_type='mx_fp', bits=8, group_size=64"),
        ({"data_type": "nv_fp", "group_size": 32}, r"data_type='nv_fp', bits=4, group_size=32"),
        ({}, r"data_type='', bits=4, group_size=32 in packing_format=auto_round:llm_compressor"),
    ],
)
def test_what_compressed_tensors_has_otherwise_is_named(options: dict[str, Any], message: str) -> None:
    method = AutoRound.of_checkpoint(scheme("auto_round:llm_compressor", **options))
    with pytest.raises(UnsupportedError, match=message):
        method.method_of(StoredModule(DOWN, "linear", torch.float32, 64, 128))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing_format": "auto_round:mlx"},
            "packing_format=auto_round:mlx; known: auto_gptq, auto_round, gptqmodel",
        ),
        ({"packing_format": "auto_round:"}, "packing_format=auto_round:; known"),
        ({"rotation_config": {"kind": "hadamard"}}, "rotation_config: rotated inputs are not read"),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        AutoRound.of_checkpoint({**scheme(None), **changes})
