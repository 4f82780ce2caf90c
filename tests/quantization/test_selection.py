"""Which method serves: the option's, the checkpoint's, or none; a method from outside is one file and one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.backends import QUANT_METHODS
from app.checkpoints.model_info import ModelInfo
from app.errors import ConfigError, UnsupportedError
from app.quantization import select_quantization
from app.quantization.fp8 import Fp8Method
from app.quantization.plain import PLAIN_METHOD
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

CPU, FP32 = torch.device("cpu"), torch.float32
PROMPTS = [[5, 9, 200, 31], list(range(40, 60))]

# Two numbers of 4 bits in a byte, a scale for each 16 inputs of an output.
FILE = """
import torch
import torch.nn.functional as F
from app.quantization.base import Dim, Leaf, QuantMethod
from app.kernels.gemm import PackedWeight

class Packed(PackedWeight):
    def __init__(self, codes, scales):
        low, high = codes & 15, codes >> 4
        numbers = torch.stack((low, high), dim=2).flatten(1).float() - 8
        self.weight = numbers * scales.repeat_interleave(16, dim=1)

    def linear(self, x, bias):
        return F.linear(x, self.weight.to(x.dtype), bias)

class Nibbles(QuantMethod):
    def leaves(self, dtype):
        return (
            Leaf("codes", torch.uint8, (Dim("output"), Dim("input", 2))),
            Leaf("scales", torch.float32, (Dim("output"), Dim("input", 16))),
        )

    def pack(self, stored):
        return Packed(stored["codes"], stored["scales"])

    @classmethod
    def of_checkpoint(cls, scheme):
        assert scheme["bits"] == 4
        return cls()
"""


@pytest.fixture
def nibbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nibbles_method.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(QUANT_METHODS._table, "nibbles", "nibbles_method:Nibbles")


def write_nibbles(source: Path, directory: Path, judge: torch.nn.Module) -> None:
    """A checkpoint of `source` in 4 bits; the judge gets the rounded weights."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors.pop(name)
        groups = weight.view(len(weight), -1, 16)
        scales = groups.abs().amax(2) / 7
        numbers = (groups / scales.unsqueeze(2)).round().view(len(weight), -1, 2)
        codes = (numbers + 8).to(torch.uint8)
        tensors[name.replace("weight", "codes")] = codes[:, :, 0] | codes[:, :, 1] << 4
        tensors[name.replace("weight", "scales")] = scales.contiguous()
        rounded = (numbers.view_as(groups) * scales.unsqueeze(2)).view_as(weight)
        judge.get_parameter(name).data.copy_(rounded)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "nibbles", "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.usefixtures("nibbles")
def test_a_new_method_is_one_file_and_one_line(tmp_path: Path) -> None:
    source = tiny_model("qwen2")
    judge = hf_model(source)
    plain = [hf_greedy(judge, prompt, 10) for prompt in PROMPTS]
    write_nibbles(source, tmp_path / "model", judge)
    expected = [hf_greedy(judge, prompt, 10) for prompt in PROMPTS]
    assert expected != plain, "the rounding should show"
    driver = Driver(str(tmp_path / "model"), num_blocks=16)
    assert "quantization: nibbles (linear layers, as in the checkpoint)" in driver.info.notes
    found = driver.run([Run(prompt, greedy(10)) for prompt in PROMPTS])
    assert [run.tokens for run in found] == expected


def test_none_for_plain_checkpoints() -> None:
    assert select_quantization(None, {}, CPU, FP32) == (PLAIN_METHOD, [])
    method, notes = select_quantization("fp8", {}, CPU, FP32)
    assert isinstance(method, Fp8Method)
    assert notes == ["quantization: fp8 (linear layers)"]


@pytest.mark.parametrize(
    ("name", "scheme", "error", "message"),
    [
        (None, {"quant_method": "vptq"}, UnsupportedError, r"not supported \(quant_method 'vptq'\)"),
        (None, {"quant_method": "int8"}, UnsupportedError, r"not supported \(quant_method 'int8'\)"),
        ("fp8", {"quant_method": "gptq"}, ConfigError, r"is quantized already \(gptq\)"),
        ("compressed-tensors", {}, ConfigError, "reads quantized checkpoints only"),
    ],
)
def test_what_cannot_be_is_refused(
    name: str | None, scheme: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        select_quantization(name, scheme, CPU, FP32)


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": True, "sym": True}, "gptq"),
        ("quantize_config.json", {"quant_method": "gptq_marlin", "bits": 4, "group_size": 64}, "gptq_marlin"),
        ("quantize_config.json", {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}, "awq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}, "awq"),
        ("quant_config.json", {"wbits": 4}, "squeezellm"),
    ],
)
def test_older_files_say_it_where_config_json_does_not(
    file: str, content: dict[str, Any], method: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), directory)
    (directory / file).write_text(json.dumps(content))
    scheme = ModelInfo.from_directory(str(directory)).quantization_scheme
    assert scheme == {**content, "quant_method": method}
    selected, _ = select_quantization(None, scheme, CPU, FP32)
    assert selected == QUANT_METHODS.load(method).of_checkpoint(content) or method == "squeezellm"
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert ModelInfo.from_directory(str(directory)).quantization_scheme == {"quant_method": "mxfp4"}


@pytest.mark.parametrize(("name", "stored"), [("gptq_marlin", "gptq"), ("awq", "awq_marlin"), ("inc", "auto-round")])
def test_several_names_are_one_method(name: str, stored: str) -> None:
    scheme = {"quant_method": stored, "bits": 4, "group_size": 128}
    assert select_quantization(name, scheme, CPU, FP32)[0] == select_quantization(None, scheme, CPU, FP32)[0]
