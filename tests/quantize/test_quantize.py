"""Checkpoints that `manta quantize` wrote, as transformers reads them with the compressed-tensors package, and as our
own loader does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import CheckpointError, ConfigError, UnsupportedError
from app.quantize.quantize import quantize
from app.quantize.settings import FORMS, QuantizeSettings
from app.quantize.source import Source
from app.quantize.texts import Texts
from app.quantize.writing import CheckpointWriter
from tests.gguf_models import write_gguf
from tests.quantize.models import PROMPT, distance, judge, judge_logits, quantized, speaking_model
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, all_logits

# Relative distance of our logits from transformers': activations are rounded in both alike, but for int8, whose largest
# number there is 127.5.
MOST = {"fp8": 1e-5, "fp8_block": 1e-5, "int8": 0.1, "w4": 1e-5}


@pytest.mark.parametrize("form", FORMS)
def test_transformers_and_the_engine_read_it(source: Path, tmp_path: Path, form: str) -> None:
    output = quantized(source, tmp_path / "out", form)
    found = all_logits(Driver(str(output), num_blocks=16), PROMPT)
    assert distance(found, judge_logits(output)) < MOST[form]
    assert 0.01 < distance(found, judge_logits(source)) < 0.6, "the rounding should show"
    if form != "fp8_block":  # online, a block may hold rows of q and of k
        online = Driver(str(source), num_blocks=16, quantization=form)
        assert torch.equal(found, all_logits(online, PROMPT))


def test_files_of_bounded_size(source: Path, tmp_path: Path) -> None:
    """No file is larger than asked for, none is lost, and other tensors are what they were."""
    output = quantized(source, tmp_path / "out", "int8", shard_bytes=200_000)
    files = sorted(output.glob("*.safetensors"))
    assert len(files) == 4
    held = [load_file(file) for file in files]
    for tensors in held:
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 200_000
    merged = {name: tensor for tensors in held for name, tensor in tensors.items()}
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file, names in zip(files, held, strict=True) for name in names}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj" not in name:
            assert torch.equal(merged[name], tensor)
    assert len(Driver(str(output), num_blocks=16).info.notes) > 0


def test_what_stays_as_it_is_is_named(tmp_path: Path) -> None:
    """Sizes that 4 bits do not go into, the head, and the gate of experts; experts themselves are quantized each."""
    source = speaking_model(tmp_path / "model", "mixtral", intermediate_size=192, num_local_experts=3, hidden_size=128)
    output = quantized(source, tmp_path / "out", "w4")
    tensors = load_file(output / "model.safetensors")
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    plain = {name.removesuffix(".weight") for name, x in tensors.items() if name.endswith(".weight") and x.ndim == 2}
    assert set(config["ignore"]) == plain | {"lm_head"}
    prefix = "model.layers.0.block_sparse_moe"
    assert {f"{prefix}.gate", f"{prefix}.experts.0.w2"} < plain  # 192 inputs
    assert f"{prefix}.experts.2.w1.weight_packed" in tensors
    found = all_logits(Driver(str(output), num_blocks=16), PROMPT)
    assert distance(found, judge_logits(source)) < 0.6


def test_an_interrupted_run_leaves_no_model(source: Path, tmp_path: Path) -> None:
    """Not even where the process is gone before it can tidy up."""
    with (
        mock.patch.object(CheckpointWriter, "abandon"),
        mock.patch("app.quantize.writing.shutil.copyfile", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        quantized(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Source.open(str(tmp_path / "out.partial"))
    with pytest.raises(ConfigError, match=r"OUTPUT: .*out\.partial is left of an interrupted run"):
        quantized(source, tmp_path / "out", "int8")
    shutil.rmtree(tmp_path / "out.partial")
    with (
        mock.patch.object(CheckpointWriter, "finish", side_effect=OSError("no space")),
        pytest.raises(ConfigError, match=r"OUTPUT: cannot write .*out\.partial: no space"),
    ):
        quantized(source, tmp_path / "out", "int8")
    assert not any(tmp_path.iterdir())


def test_outputs_behind_links_and_in_the_way(source: Path, tmp_path: Path) -> None:
    """A link is followed; what cannot be moved to its name stays whole, and is said to."""
    (tmp_path / "empty").mkdir()
    for name, place in (("one", "empty"), ("two", "new")):
        (tmp_path / name).symlink_to(tmp_path / place)
        quantized(source, tmp_path / name, "int8")
        assert (tmp_path / place / "config.json").exists()
    with pytest.raises(ConfigError, match=r"OUTPUT: cannot use xxx.*name too long"):
        quantized(source, Path("x" * 300), "int8")
    with pytest.raises(ConfigError, match=r"OUTPUT: / is where something is mounted|OUTPUT: / is not empty"):
        quantized(source, Path("/"), "int8")
    taken = mock.patch.object(Path, "replace", side_effect=OSError(39, "Directory not empty"))
    with taken, pytest.raises(ConfigError, match=r"the checkpoint is complete in .*three\.partial, but .* not empty"):
        quantized(source, tmp_path / "three", "int8")
    assert (tmp_path / "three.partial" / "config.json").exists()


def test_questions_are_read_before_anything_is_written(tmp_path: Path, texts: Path) -> None:
    source = speaking_model(tmp_path / "model")
    (source / "heldout.jsonl").write_text('{"text": "not a question"}\n')
    with pytest.raises(
        ConfigError, match=r"MODEL: .*heldout\.jsonl:1 is no question \(family is None\); --questions 0"
    ):
        quantized(source, tmp_path / "out", "int8", report=True, calibration=texts)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_of_plain_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, sizes = tmp_path / "model.gguf", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_gguf(tiny_model("llama", **sizes, head_dim=32, initializer_range=0.1), file, "llama", lambda name: "F32")
    found, plain = (
        all_logits(Driver(str(model), num_blocks=16), PROMPT[:3])
        for model in (quantized(file, tmp_path / "out", "int8"), file)
    )
    assert 0 < distance(found, plain) < 0.1


def test_scales_of_the_kv_cache(source: Path, texts: Path, tmp_path: Path) -> None:
    """Those of the largest keys and values that transformers computes."""
    output = quantized(source, tmp_path / "out", None, kv="head", calibration=texts)
    tensors, model = load_file(output / "model.safetensors"), judge(source)
    largest = torch.zeros(2, 2, 2)  # layers, keys and values, heads
    for text in Texts.read(texts, source, 128, 512, 1024).calibration:
        with torch.inference_mode():
            cache = model(torch.tensor([text]), use_cache=True).past_key_values
        for number, layer in enumerate(cache.layers):
            for kind, states in enumerate((layer.keys, layer.values)):
                largest[number, kind] = torch.maximum(largest[number, kind], states[0].abs().amax((1, 2)))
    for number in range(2):
        for kind, name in enumerate("kv"):
            scale = tensors[f"model.layers.{number}.self_attn.{name}_scale"]
            torch.testing.assert_close(scale.flatten(), largest[number, kind] / 448, rtol=1e-4, atol=0)
    driver = Driver(str(output), num_blocks=16, kv_cache_dtype="fp8")
    assert "KV cache scales: from the checkpoint, in 2 of 2 layers" in driver.info.notes
    assert 0 < distance(all_logits(driver, PROMPT), judge_logits(source)) < 0.1
    whole = quantized(source, tmp_path / "whole", "fp8", kv="tensor", calibration=texts)
    scale = load_file(whole / "model.safetensors")["model.layers.0.self_attn.v_scale"]
    torch.testing.assert_close(scale, largest[0, 1].amax()[None] / 448, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"form": None}, "--to: one of fp8"),
        ({"form": "int8", "device": "tpu"}, "--device: 'tpu' is none of auto, cpu"),
        ({"form": "int8", "awq": True}, "--awq: for 4-bit weights only"),
        ({"form": "fp8", "group_size": 64}, "--group-size: for 4-bit weights only"),
        ({"form": "w4", "report": False, "calibration": Path("x")}, "--calibration: nothing here reads them"),
        ({"form": "w4", "report": False, "length": 64}, "--length: nothing here reads them"),
        ({"form": "w4", "report": False, "awq": True, "questions": 3}, "--questions: nothing here reads them"),
    ],
)
def test_options_that_contradict_each_other(tmp_path: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizeSettings("tiny-chat", tmp_path / "out", **given)  # type: ignore[arg-type]


def test_what_cannot_be_quantized_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match=r"OUTPUT: .*full is not empty"):
        quantized(source, tmp_path / "full", "int8")
    once = quantized(source, tmp_path / "once", "int8")
    with pytest.raises(ConfigError, match=r"MODEL: .*once is quantized already \(compressed-tensors\)"):
        quantized(once, tmp_path / "twice", "int8")
    with pytest.raises(UnsupportedError, match=r"transformer\.h\.0\.attn\.c_attn: the checkpoint holds no weight"):
        quantized(tiny_model("gpt2", n_embd=64, n_head=2, n_layer=2, without=[]), tmp_path / "gpt2", "int8")
    stacked = tiny_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts: .* experts in one tensor"):
        quantized(stacked, tmp_path / "stacked", "int8")
    with pytest.raises(ConfigError, match=r"--to: no linear layer has sizes that can be stored so"):
        quantized(tiny_model("llama"), tmp_path / "small", "w4")
    damaged, name = speaking_model(tmp_path / "once" / "damaged"), "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(damaged / "model.safetensors")
    tensors[name][3, 5] = torch.inf
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"MODEL: {name} holds numbers that are not finite"):
        quantized(damaged, tmp_path / "damaged", "int8")
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"--kv: keys or values of model\.layers\.0\.self_attn are not finite"):
        quantized(damaged, tmp_path / "damaged", None, kv="head", samples=4, length=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "once"]
    assert quantize(QuantizeSettings(str(source), tmp_path / "out", "int8", report=False, device="cpu")) is None
