"""A model is the same from whatever format its weights come, on each rank; transformers is the judge of its answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from app.checkpoints.tensors import reader
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError
from app.loading.load_formats import open_checkpoint
from app.loading.load_formats.pt import Pt
from app.loading.load_formats.safetensors import Safetensors
from app.worker.save_sharded import save_sharded
from tests.loading.load_formats.formats import as_pt, assert_same, contexts, fill, state
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

PROMPT = [5, 300, 17, 42, 8]
SHAPE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LAYOUTS = [(2, 1), (1, 2), (2, 2)]


def sharded(source: Path, output: Path, tp: int = 1, pp: int = 1, **options: Any) -> Path:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    save_sharded(EngineConfig(model=str(source), **sizes, **options), output)
    assert not list(output.glob("model*.index.json"))
    return output


@pytest.mark.parametrize("name", ["pt", "pt in files", "pt of old", "sharded_state"])
def test_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    source = tiny_model("qwen2", **SHAPE)  # with biases
    makers = {
        "pt": lambda: as_pt(source, tmp_path / "m"),
        "pt in files": lambda: as_pt(source, tmp_path / "m", files=3),
        "pt of old": lambda: as_pt(source, tmp_path / "m", _use_new_zipfile_serialization=False),
        "sharded_state": lambda: sharded(source, tmp_path / "m"),
    }
    directory = makers[name]()
    assert not list(directory.glob("model*.safetensors")) or name == "sharded_state"
    answers = Driver(str(directory)).run([Run(PROMPT, greedy(8))])
    assert answers[0].tokens == hf_greedy(hf_model(source), PROMPT, 8)


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_every_rank_holds_the_same_from_every_format(tmp_path: Path, tp: int, pp: int) -> None:
    source = tiny_model("qwen2", **SHAPE)
    others = [as_pt(source, tmp_path / "pt", files=2), sharded(source, tmp_path / "sharded", tp, pp)]
    for ctx in contexts(source, tp, pp):
        first = fill(source, ctx=ctx)
        for other in others:
            assert_same(first, fill(other, ctx=ctx))


@pytest.mark.parametrize("piece_bytes", [64, 1000])
def test_pieces_of_any_size_make_the_same_model(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    source = tiny_model("llama", dtype="bfloat16", **SHAPE)
    ctx = contexts(source, tp=2)[1]
    whole = fill(source, ctx=ctx)
    monkeypatch.setattr("app.checkpoints.tensors.checkpoint.PIECE_BYTES", piece_bytes)
    assert_same(whole, fill(source, ctx=ctx))


def test_weights_are_converted_to_the_compute_type() -> None:
    source = tiny_model("llama", dtype="bfloat16")
    (ctx,) = contexts(source)
    assert {tensor.dtype for tensor in state(fill(source, ctx=ctx)).values()} == {torch.bfloat16}
    judge = hf_model(source).state_dict()  # in fp32
    answers = Driver(str(source), dtype="float32").run([Run(PROMPT, greedy(8))])
    assert answers[0].tokens == hf_greedy(hf_model(source), PROMPT, 8)
    assert judge["model.norm.weight"].dtype == torch.float32


def test_a_rank_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny_model("llama", **SHAPE)
    directory = sharded(source, tmp_path / "m", tp=2)
    with pytest.raises(ConfigError, match=r"was saved for TP 2 x PP 1 \(layers 2\), this is TP 1 x PP 1"):
        fill(directory)
    staged = sharded(tiny_model("llama", num_hidden_layers=3), tmp_path / "n", pp=2, pipeline_partition=(1, 2))
    with pytest.raises(ConfigError, match=r"layers 1\+2\), this is TP 1 x PP 2 \(2 layers in stage 0\)"):
        fill(staged, ctx=contexts(staged, pp=2)[0])


def test_a_layout_without_layers_of_every_stage_is_refused(tmp_path: Path) -> None:
    source = tiny_model("llama", num_hidden_layers=3)
    directory = sharded(source, tmp_path / "m", pp=2, pipeline_partition=(1, 2))
    manifest = directory / "sharded_state.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "pipeline_partition": [1]}))
    with pytest.raises(CheckpointError, match=r"sharded_state\.json.*must name the layers of each stage"):
        fill(directory, ctx=contexts(directory, pp=2)[1])


def test_incomplete_sharded_state_is_named(tmp_path: Path) -> None:
    directory = sharded(tiny_model("llama", **SHAPE), tmp_path / "m", tp=2)
    lost = directory / "model-rank-1-part-0.safetensors"
    with safe_open(lost, framework="pt") as file:
        assert "model.norm.weight" in file.keys()  # noqa: SIM118
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"holds no model-rank-1-part-\*"):
        fill(directory, ctx=contexts(directory, tp=2)[1])
    (directory / "sharded_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no sharded_state\.json: save it with"):
        fill(directory, load_format="sharded_state")


def test_auto_prefers_safetensors_to_bin(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "both"))
    (directory / "pytorch_model.bin").write_text("unreadable")
    fill(directory)
    assert open_checkpoint(directory).keys() == Safetensors().tensors(directory, reader.Reader()).keys()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        Pt().tensors(directory, reader.Reader())


def test_an_open_checkpoint_reads_at_once() -> None:
    source = tiny_model("llama", **SHAPE)
    name = "model.layers.1.self_attn.o_proj.weight"
    stored, judge = open_checkpoint(source)[name], hf_model(source).state_dict()[name]
    target = torch.empty(len(judge), 20)
    stored.read_into(target, 1, 13)
    assert torch.equal(target, judge[:, 13:33])
