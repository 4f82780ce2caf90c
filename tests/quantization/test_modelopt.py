"""ModelOpt's checkpoints from a packer of our own: NVFP4 by compressed-tensors' table, fp8 by PyTorch's rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError
from app.quantization.modelopt import ModelOpt
from tests.loading.load_formats.formats import fill
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.tiny_models import tiny_model

FP8 = torch.float8_e4m3fn
SIZES: dict[str, Any] = {**HEADS, "intermediate_size": 112}  # 7 groups of 16
DOWN = "model.layers.0.mlp.down_proj"


def scheme(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"], **more}


def nvfp4(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    groups = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * 448)
    scale = (groups.abs().amax(2) / 6 / whole).clamp(min=0.01).to(FP8)
    step = scale.float().unsqueeze(2) * whole
    codes = pack_fp4_to_uint8(_to_e2m1(groups / step).flatten(1))
    values = unpack_fp4_from_uint8(codes, *weight.shape, dtype=torch.float32).unflatten(1, (-1, 16)) * step
    stored = {"weight": codes, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.1)}
    return stored, values.flatten(1)


def _to_e2m1(x: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = (x.abs().unsqueeze(-1) - numbers).abs().argmin(-1)
    return numbers[nearest] * x.sign()


def fp8(kind: str) -> Pack:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        dims = {"row": 1}.get(kind)
        largest = weight.abs().amax() if dims is None else weight.abs().amax(1)
        scale = largest / 448
        step = scale if dims is None else scale.unsqueeze(1)
        codes = (weight / step).to(FP8)
        stored = {"weight": codes, "weight_scale": scale}
        return stored | ({"input_scale": torch.tensor(0.02)} if kind == "static" else {}), codes.float() * step

    return pack


def fp8_blocks(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Scales [blocks of outputs, 1, blocks of inputs, 1], as ModelOpt exports them."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 128, 0, -outputs % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).clamp(min=1e-9)
    codes = (blocks / scale).to(FP8)
    plain = (codes.float() * scale).flatten(2).flatten(0, 1)[:outputs, :inputs]
    return {"weight": codes.flatten(2).flatten(0, 1)[:outputs, :inputs], "weight_scale": scale}, plain


def mxfp8(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """The last group shorter, where it must be."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    exponent = (padded.abs().amax(2) / 448).log2().ceil()
    codes = (padded / exponent.exp2()[..., None]).to(FP8)
    plain = (codes.float() * exponent.exp2()[..., None]).flatten(1)[:, : weight.shape[1]]
    return {"weight": codes.flatten(1)[:, : weight.shape[1]], "weight_scale": (exponent + 127).to(torch.uint8)}, plain


def mixed(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
    if "down_proj" in name:
        return nvfp4(name, weight)
    return fp8("tensor")(name, weight) if "k_proj" in name else None


LAYERS = {
    f"model.layers.{number}.{module}": {"quant_algo": algorithm}
    for number in range(2)
    for module, algorithm in (("mlp.down_proj", "NVFP4"), ("self_attn.k_proj", "FP8"))
}
FORMS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "nvfp4": (nvfp4, scheme("NVFP4", group_size=16)),
    "fp8-static": (fp8("static"), scheme("FP8")),
    "fp8-dynamic": (fp8("tensor"), scheme("FP8")),
    "fp8-rows": (fp8("row"), scheme("FP8_PER_CHANNEL_PER_TOKEN")),
    "fp8-blocks": (fp8_blocks, scheme("FP8_PB_WO")),
    "mxfp8": (mxfp8, scheme("MXFP8")),
    "mixed": (mixed, scheme("MIXED_PRECISION", quantized_layers=LAYERS)),
}


def made(form: str, directory: Path) -> Path:
    return write(tiny_model("llama", **SIZES), directory, *FORMS[form])


def test_logits_are_those_of_its_weights(tmp_path: Path) -> None:
    check_logits(made("nvfp4", tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_has_its_shares(form: str, tmp_path: Path) -> None:
    check_weights(made(form, tmp_path), tp=2)


def test_the_older_file_says_the_same(tmp_path: Path) -> None:
    directory = made("nvfp4", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    older = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": older}
    (directory / "hf_quant_config.json").write_text(json.dumps(content))
    assert ModelInfo.from_directory(str(directory)).quantization_scheme["quant_method"] == "modelopt"
    check_weights(directory)


def test_excluded_modules_are_plain(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        return None if "layers.1." in name or name.endswith("q_proj") else nvfp4(name, weight)

    excluded = ["lm_head", "model.layers.1*", "model.layers.0.self_attn.q_proj"]
    source = tiny_model("llama", **SIZES)
    check_logits(write(source, tmp_path, pack, scheme("NVFP4", group_size=16, exclude_modules=excluded)))


@pytest.mark.parametrize(
    ("name", "edit", "error", "message"),
    [
        (f"{DOWN}.weight_scale_2", None, CheckpointError, r"lacks .*down_proj\.weight_scale_2"),
        (f"{DOWN}.weight_scale", None, CheckpointError, r"lacks .*down_proj\.weight_scale"),
        (f"{DOWN}.weight_scale", lambda x: x[:, :3], CheckpointError, r"down_proj\.weight_scale .* \[64, 3\]"),
        (f"{DOWN}.weight", lambda x: x.float(), CheckpointError, r"down_proj\.weight .* holds float32"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(
    name: str,
    edit: Callable[[torch.Tensor], torch.Tensor] | None,
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    directory = made("nvfp4", tmp_path)
    change(directory, name, edit)
    with pytest.raises(error, match=message):
        fill(directory)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="quant_algo 'W4A8_AWQ' is not supported; known: FP8"):
        ModelOpt.of_checkpoint(scheme("W4A8_AWQ"))
    directory = made("nvfp4", tmp_path)
    change(directory, f"{DOWN}.input_scale", lambda x: x)
    copy = Path(shutil.copytree(directory, tmp_path / "smoothed"))
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, f"{DOWN}.pre_quant_scale": torch.ones(112)}, copy / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"down_proj\.pre_quant_scale is not read"):
        fill(copy)
