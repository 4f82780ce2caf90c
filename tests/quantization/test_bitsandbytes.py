"""Checkpoints that bitsandbytes itself packs, against transformers with the weights that it unpacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from app.errors import CheckpointError, MantaError, UnsupportedError
from app.quantization.bitsandbytes import BitsAndBytes
from tests.loading.load_formats.formats import fill
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

SIZES: dict[str, Any] = {**HEADS, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
STATE = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
SCHEME4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SCHEME8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def four_bits(kind: str, nested: bool) -> Pack:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        codes, state = bnb.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
        stored = {"weight": codes, **{f"weight.{leaf}": value for leaf, value in state.as_dict(packed=True).items()}}
        return stored, bnb.functional.dequantize_4bit(codes, state).float()

    return pack


def eight_bits(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    layer = bnb.nn.Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    stored = layer.to("cpu").state_dict()
    return stored, stored["weight"] * stored["SCB"].unsqueeze(1) / 127


FORMS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "nf4": (four_bits("nf4", False), SCHEME4),
    "nf4-nested": (four_bits("nf4", True), SCHEME4),
    "fp4": (four_bits("fp4", False), SCHEME4),
    "int8": (eight_bits, SCHEME8),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in found:
            source = tiny_model("llama", **SIZES)
            found[form] = write(source, tmp_path_factory.mktemp(form), *FORMS[form])
        return found[form]

    return make


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_its_weights(form: str, made: Callable[[str], Path]) -> None:
    check_logits(made(form))


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_has_its_shares(form: str, made: Callable[[str], Path]) -> None:
    """Of 192 inputs a rank's share begins within a block of 64."""
    check_weights(made(form), tp=2)


@pytest.mark.parametrize("scheme", [SCHEME4, SCHEME8], ids=["4bit", "8bit"])
def test_random_weights(scheme: dict[str, Any], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model("llama", **SIZES), tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    driver = Driver(str(copy), num_blocks=16, load_format="dummy")
    assert len(driver.run([Run([5, 9], greedy(3))])[0].tokens) == 3


def as_state(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(x: torch.Tensor) -> torch.Tensor:
        state = {**json.loads(bytes(x.tolist())), **changes}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return edit


@pytest.mark.parametrize(
    ("form", "name", "edit", "message"),
    [
        ("nf4", STATE, None, r"lacks .*down_proj\.weight\.quant_state\.bitsandbytes__nf4"),
        ("nf4", STATE, as_state(shape=[128, 64]), r"bitsandbytes__nf4 says shape \[128, 64\]"),
        ("nf4", STATE, as_state(blocksize=100), r"down_proj has 192 inputs, which are no blocks of 100"),
        ("nf4", STATE, lambda x: x[:20], r"bitsandbytes__nf4 is no state of a weight"),
        ("nf4-nested", STATE, as_state(nested_offset="x"), r"nested blocks of 256 with the offset x"),
        ("nf4", "model.layers.0.mlp.down_proj.weight.absmax", None, r"lacks .*down_proj\.weight\.absmax"),
        ("nf4", "model.layers.0.mlp.down_proj.weight.absmax", lambda x: x[:9], r"absmax .* has shape \[9\]"),
        ("nf4", "model.layers.0.mlp.down_proj.weight.quant_map", None, r"down_proj\.weight\.quant_map is missing"),
        ("nf4-nested", "model.layers.0.mlp.down_proj.weight.nested_absmax", None, r"lacks .*nested_absmax"),
        ("int8", "model.layers.0.mlp.down_proj.SCB", None, r"lacks .*down_proj\.SCB"),
        ("int8", "model.layers.0.mlp.down_proj.weight_format", lambda x: torch.ones(2), r"weight_format is \[1"),
        ("int8", "model.layers.0.mlp.down_proj.weight_format", lambda x: x + 1, r"weight_format is 1; only rows"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(
    form: str,
    name: str,
    edit: Callable[[torch.Tensor], torch.Tensor] | None,
    message: str,
    made: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    copy = Path(shutil.copytree(made(form), tmp_path / "model"))
    change(copy, name, edit)
    with pytest.raises(MantaError, match=message) as caught:
        fill(copy)
    assert isinstance(caught.value, CheckpointError | UnsupportedError)


def test_bytes_of_another_type_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bnb_4bit_quant_storage=bfloat16 is not supported"):
        BitsAndBytes.of_checkpoint({**SCHEME4, "bnb_4bit_quant_storage": "bfloat16"})
