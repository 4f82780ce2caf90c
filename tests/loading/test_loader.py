"""Checkpoints: what is missing, too much or misshapen is named; shards, ties and types are understood."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext
from app.loading.loader import load_model
from app.models.decoder import CausalLM
from app.records.parallel_plan import stage_layers
from app.worker.attention.backend import select_attention
from tests.tiny_models import hf_model, tiny_model

CPU = torch.device("cpu")


def load(directory: Path, load_format: str = "auto", seed: int = 0) -> CausalLM:
    ctx = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())
    return load_model(ModelInfo.from_directory(str(directory)), ctx, load_format, seed)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model directory that the test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_fused_parameters_hold_their_parts() -> None:
    directory = tiny_model("qwen2", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    attention = load(directory).model.layers["1"].self_attn
    reference = hf_model(directory).model.layers[1].self_attn
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(reference, f"{name}_proj"), kind) for name in "qkv"]
        assert torch.equal(getattr(attention.qkv_proj, kind), torch.cat(parts))


def test_missing_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(copy)


def test_unexpected_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(copy)


def test_misshapen_tensor_is_named_with_both_shapes(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(100, 64)}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight in .* \[100, 64\], the model expects \[112, 64\]"):
        load(copy)


def test_rotary_tables_of_old_checkpoints_are_tolerated(copy: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(copy, lambda tensors: tensors.update({name: torch.zeros(16)}))
    load(copy)


def test_tied_head(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama", tie_word_embeddings=True), tmp_path / "model"))
    model = load(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(directory)


def test_untied_head_must_be_there(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load(copy)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    whole, sharded = tiny_model("llama"), tiny_model("llama", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    left, right = load(whole).state_dict(), load(sharded).state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    broken = Path(shutil.copytree(sharded, tmp_path / "model"))
    lost = sorted(broken.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        load(broken)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_ranks_read_every_weight_once_between_them(monkeypatch: pytest.MonkeyPatch, tp: int, pp: int) -> None:
    directory = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    info = ModelInfo.from_directory(str(directory))
    read: dict[str, int] = {}
    read_into = StoredTensor.read_into

    def count(tensor: StoredTensor, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        pieces = tensor.reader._pieces
        before = len(pieces)
        read_into(tensor, target, dim, start)
        read[tensor.name] = read.get(tensor.name, 0) + sum(piece.target.numel() for piece in pieces[before:])

    monkeypatch.setattr(StoredTensor, "read_into", count)
    channel: Any = object()  # loading sends nothing to other ranks
    for rank, stage in itertools.product(range(tp), range(pp)):
        groups = ParallelGroups(tp=RankGroup(rank, tp, channel), pp=RankGroup(stage, pp, channel if pp > 1 else None))
        layers = stage_layers(info.num_layers, pp, None)[stage]
        ops, _ = select_attention("torch", CPU)
        load_model(info, BuildContext(torch.float32, CPU, 64, ops, groups, layers), "safetensors", 0)
    sizes = {name: tensor.numel() for name, tensor in load_file(directory / "model.safetensors").items()}
    norms = {name for name in sizes if "norm" in name}  # every rank of a stage holds them
    assert read == {name: size * (tp if name in norms else 1) for name, size in sizes.items()}


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"holds no weights: none of model\.safetensors, .*\.json, pytorch_model",
    ):
        load(copy)


def test_truncated_file_is_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load(copy)


def test_broken_index_is_named(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(copy)


def test_dummy_weights_follow_the_seed(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    first, same, other = (load(copy, "dummy", seed).state_dict() for seed in (1, 1, 2))
    for name, tensor in first.items():
        assert torch.equal(tensor, same[name])
        assert tensor.isfinite().all()
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert 0.015 < tensor.std() < 0.025


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, r"unknown model architecture 'RwkvForCausalLM'; known: .*Aquila"),
        ({"hidden_act": "mish"}, "unknown hidden_act 'mish'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "unknown rope_type 'spiral'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=2 is no multiple of num_key_value_heads=3"),
    ],
)
def test_unknown_variants_are_refused_by_name(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(copy, **changes)
    with pytest.raises(UnsupportedError, match=message):
        load(copy)


def test_unknown_layer_type_is_refused(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "model"))
    edit_config(directory, use_sliding_window=True, sliding_window=8, layer_types=["full_attention", "chunked"])
    with pytest.raises(UnsupportedError, match="chunked"):
        load(directory)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_that_the_files_lack_are_told_before_any_is_built(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building 16,384 layers took 131 s, until their tensors were missed."""
    directory = Path(shutil.copytree(tiny_model(family), tmp_path / "model"))
    edit_config(directory, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 1 << 14})
    monkeypatch.setattr("app.loading.loader._built", lambda *_: pytest.fail("nothing is built"))
    found = "is not usable: the number of layers is 16384, but the checkpoint lacks layer 2 and what follows"
    with pytest.raises(CheckpointError, match=rf"config\.json {found}"):
        load(directory)


@pytest.mark.parametrize("name", ["model.layers." + "9" * 5000 + ".mlp.weight", "x" * 1025])
def test_a_name_longer_than_any_is_named(name: str, copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: a tensor's name has \d+ characters"):
        load(copy)
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*pytorch_model\.bin: a tensor's name has \d+ characters"):
        load(copy)
