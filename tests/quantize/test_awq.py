"""Scales for inputs: the model stays what it is, and 4 bits cost less where activations are uneven."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import UnsupportedError
from app.quantization.compressed_form import compressed_form
from app.quantize.awq import InputScaleSearch
from app.quantize.layerwise import LayerwiseModel
from app.quantize.source import Source
from app.quantize.texts import Texts
from app.quantize.token_batch import TokenBatch
from tests.quantize.models import PROMPT, distance, judge, judge_logits, quantized, speaking_model


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many query heads as KV heads, biases, and a few inputs that are much larger than the others."""
    source = speaking_model(
        tmp_path_factory.mktemp("uneven") / "model", num_key_value_heads=4, attention_bias=True, mlp_bias=True
    )
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::64] *= 60
        if name.endswith(("v_proj.weight", "up_proj.weight")):
            tensor[::13] *= 9
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


def test_the_model_stays_what_it_is(uneven: Path, texts: Path, tmp_path: Path) -> None:
    """The changed tensors, not rounded, give the same logits in transformers."""
    opened = Source.open(str(uneven))
    batches = TokenBatch.split(Texts.read(texts, uneven, 128, 512, 1024).calibration)
    weights = [linear.weight for linear in opened.linears]
    search = InputScaleSearch(opened.tensors, opened.names, weights, compressed_form("w4").round, len(batches))
    LayerwiseModel(str(uneven), "cpu").run(batches, [search])
    shutil.copytree(uneven, tmp_path / "changed")
    tensors = load_file(uneven / "model.safetensors")
    changed = {name: search.changes[name].apply(x) if name in search.changes else x for name, x in tensors.items()}
    save_file(changed, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    for part in ("input_layernorm", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.weight"
        assert distance(changed[name], tensors[name].float()) > 0.05, f"no scale for {part}"
    assert distance(judge_logits(tmp_path / "changed"), judge_logits(uneven)) < 1e-3


@torch.inference_mode()
def queries(directory: Path) -> torch.Tensor:
    """What the first layer's q_proj gives in transformers: the inputs of it are those of a plain model."""
    model, found = judge(directory), []
    linear = model.model.layers[0].self_attn.q_proj
    linear.register_forward_hook(lambda module, arguments, output: found.append(output[0]))
    model(torch.tensor([PROMPT]))
    return found[0]


def test_four_bits_cost_less(uneven: Path, texts: Path, tmp_path: Path) -> None:
    plain = queries(uneven)
    rounded = queries(quantized(uneven, tmp_path / "rtn", "w4"))
    scaled = queries(quantized(uneven, tmp_path / "awq", "w4", awq=True, calibration=texts))
    assert distance(scaled, plain) < 0.8 * distance(rounded, plain)


def test_other_layers_are_refused_by_name(texts: Path, tmp_path: Path) -> None:
    for family, found in (("gemma2", "Gemma2ForCausalLM's layers"), ("mixtral", "MixtralForCausalLM has ExpertMLP")):
        source = speaking_model(tmp_path / family, family)
        with pytest.raises(UnsupportedError, match=f"--awq: {found}"):
            quantized(source, tmp_path / "out", "w4", awq=True, calibration=texts)
    assert not torch.is_inference_mode_enabled()
    assert not (tmp_path / "out.partial").exists()
