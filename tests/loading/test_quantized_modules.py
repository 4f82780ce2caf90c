"""Layers are stored as their modules in the checkpoint are, whatever a family calls or fuses them: against transformers
with the weights that were stored."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.backends import QUANT_METHODS
from app.checkpoints.tensors.leaf import Dim, Leaf
from app.config.engine import EngineConfig
from app.errors import CheckpointError
from app.layers.linear import Linear
from app.layers.vocab import VocabEmbedding
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.forms import PlainForm, WeightForm
from app.worker.save_sharded import save_sharded
from tests.loading.load_formats.formats import contexts, fill, state
from tests.models.families.test_families import NEOX
from tests.quantization.checkpoints import check_stored
from tests.quantization.stored_forms import FORMS
from tests.tiny_models import hf_model, tiny_model
from tests.worker.worker_driver import Driver, all_logits

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = [5, 9, 200, 31, 7, 77]


@dataclass(frozen=True)
class Nibbles(QuantMethod):
    """Two inputs in a byte, outputs along the second dimension, a scale for each `group` inputs, one of the whole."""

    group: int = 16
    skipped: tuple[str, ...] = ()
    coarse: tuple[str, ...] = ()  # modules whose groups are of 32
    head: bool = False
    unused = ("shape",)

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        is_coded = module.kind == "linear" or (self.head and "codes" in (module.tensors or {"codes": None}))
        if not is_coded:
            return None
        if any(re.search(pattern, module.name) for pattern in self.skipped):
            assert module.tensors is None or "codes" not in module.tensors
            return None
        return Nibbles(32 if any(re.search(pattern, module.name) for pattern in self.coarse) else self.group)

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        return (
            Leaf("codes", torch.uint8, (Dim("input", 2), Dim("output"))),
            Leaf("inner.scales", torch.float32, (Dim("input", self.group), Dim("output")), dummy=0.005),
            Leaf("factor", torch.float32, (Dim("part"),), dummy=1.0),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        codes = stored["codes"]
        numbers = torch.stack((codes & 15, codes >> 4), 1).flatten(0, 1).float() - 8
        numbers = shares.own(numbers, 0, Dim("input", 2))
        scales, size = shares.spread(stored["inner.scales"], 0, Dim("input", self.group))
        scales = scales.repeat_interleave(size, 0)[: shares.num_inputs]
        return PlainForm(((numbers * scales).t() * shares.rows_of_parts(stored["factor"])).contiguous())

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        names = {name: tuple(scheme.get(name, ())) for name in ("skipped", "coarse")}
        return cls(head=bool(scheme.get("head")), **names)


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANT_METHODS._table, "nibbles", f"{__name__}:Nibbles")


def quantized(source: Path, directory: Path, *, linear: str = r"_proj\.weight$", **scheme: Any) -> Path:
    """A checkpoint with its linear layers in 4 bits; `source` beside it gets the numbers that they stand for."""
    shutil.copytree(source, directory)
    method = Nibbles.of_checkpoint(scheme)
    assert isinstance(method, Nibbles)
    tensors, plain = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    for number, name in enumerate(sorted(tensors)):
        found = re.search(linear, name) or (method.head and name == "lm_head.weight")
        module = name.removesuffix(".weight")
        if not found or any(re.search(pattern, module) for pattern in method.skipped):
            continue
        weight, factor = tensors.pop(name), torch.tensor(0.5 + number / 8)
        group = 32 if any(re.search(pattern, module) for pattern in method.coarse) else 16
        groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).view(len(weight), -1, group)
        scales = groups.abs().amax(2) / 7 / factor
        numbers = (groups / scales[..., None].clamp(min=1e-9) / factor).round()
        plain[name] = (numbers * scales[..., None] * factor).flatten(1)[:, : weight.shape[1]].contiguous()
        codes = (numbers + 8).to(torch.uint8).flatten(1)[:, : weight.shape[1]].t()
        tensors[f"{module}.codes"] = (codes[0::2] | codes[1::2] << 4).contiguous()
        tensors[f"{module}.inner.scales"] = scales.t().contiguous()
        tensors[f"{module}.factor"] = factor
        tensors[f"{module}.shape"] = torch.tensor(weight.shape)
    save_file(tensors, directory / "model.safetensors")
    judge = directory.parent / "judge"
    shutil.copytree(source, judge)
    save_file(plain, judge / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "nibbles", **scheme}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def check_logits(directory: Path, **options: Any) -> Driver:
    driver = Driver(str(directory), num_blocks=16, **options)
    judge = hf_model(directory.parent / "judge")
    with torch.inference_mode():
        expected = judge(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(driver, PROMPT), expected, rtol=0, atol=1e-3)
    return driver


def modules(driver: Driver, kind: type) -> dict[str, Any]:
    assert driver.worker._runner is not None
    model = driver.worker._runner._forward.model
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


@pytest.mark.parametrize(
    ("family", "changes", "linear", "scheme"),
    [
        ("llama", {"tie_word_embeddings": False}, r"_proj\.weight$", {"head": True}),
        (
            "phi3",
            {"pad_token_id": 0},
            r"_proj\.weight$",
            {"coarse": ["layers.0.self_attn.qkv"]},
        ),  # one tensor of three parts
        ("glm4", {"pad_token_id": 0}, r"_proj\.weight$", {}),  # rows in another order
        (
            "gpt_neox",
            NEOX,
            r"(query_key_value|dense\w*)\.weight$",
            {"skipped": ["gpt_neox.layers.1.mlp"]},
        ),  # other names
    ],
    ids=["llama", "phi3", "glm4", "gpt_neox"],
)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], linear: str, scheme: dict[str, Any]
) -> None:
    check_logits(quantized(tiny_model(family, **changes), tmp_path / "model", linear=linear, **scheme))


FUSED = ["bnb-nf4", "bnb-nf4-nested", "fp8-output", "torchao-int8-groups"]
# The parts of these projections begin within ModelOpt's blocks of 128 outputs, which is refused by name.
IN_MORE_FORMS = [name for name in FORMS if name not in (*FUSED, "modelopt-mixed", "modelopt-fp8-blocks")]


@pytest.mark.parametrize("form", [*FUSED, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_MORE_FORMS)])
def test_fused_projections_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    """A module of a checkpoint has the rows of all its parts, wherever its form is told by its shape."""
    sizes = {"intermediate_size": 128, **FORMS[form].sizes, "initializer_range": 0.1}
    check_stored(FORMS[form].write(tiny_model("phi3", pad_token_id=0, **sizes), tmp_path))


def test_parts_that_are_stored_unlike_are_loaded_apart(tmp_path: Path) -> None:
    scheme = {"skipped": [r"layers\.0\.self_attn\.v_proj"], "coarse": [r"layers\.1\.self_attn\.q_proj", "up_proj"]}
    driver = check_logits(quantized(tiny_model("llama"), tmp_path / "model", **scheme))
    linears = modules(driver, Linear)
    names = {name: list(dict(linears[name].named_parameters())) for name in linears if "qkv" in name}
    assert names["model.layers.0.self_attn.qkv_proj"][:2] == ["q_proj_k_proj_codes", "q_proj_k_proj_inner__scales"]
    assert "v_proj_weight" in names["model.layers.0.self_attn.qkv_proj"]


def test_through_transformers_modules(tmp_path: Path) -> None:
    source = tiny_model("llama")
    directory = quantized(source, tmp_path / "model", skipped=[r"^model\.layers\.1\.mlp\.down_proj$"])
    check_logits(directory, model_impl="transformers")


def test_a_quantized_embedding_is_dequantized_for_the_head_too(tmp_path: Path) -> None:
    source = tiny_model("llama", tie_word_embeddings=True)
    directory = quantized(source, tmp_path / "model", linear=r"(_proj|embed_tokens)\.weight$", head=True)
    driver = check_logits(directory)
    (embedding,) = modules(driver, VocabEmbedding).values()
    assert all(parameter.is_meta for parameter in embedding.parameters())


def test_dummy_weights_are_random_codes(tmp_path: Path) -> None:
    directory = quantized(tiny_model("llama"), tmp_path / "model", head=True)
    (directory / "model.safetensors").unlink()
    driver = Driver(str(directory), num_blocks=16, load_format="dummy")
    logits = all_logits(driver, PROMPT)
    assert logits.isfinite().all()
    assert logits.std() > 0.01


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_hold_their_shares(tmp_path: Path, tp: int) -> None:
    """Of 12 or 24 inputs, which begin within a group; the last of four has no full share of the vocabulary."""
    source = tiny_model("llama", intermediate_size=48, tie_word_embeddings=False, vocab_size=257, **HEADS)
    directory = quantized(source, tmp_path / "model", head=True, coarse=["down_proj"])
    whole = load_file(tmp_path / "judge" / "model.safetensors")
    for rank, ctx in enumerate(contexts(directory, tp)):
        model = fill(directory, ctx=ctx)
        layer = model.model.layers["1"]
        size = 48 // tp
        own = slice(rank * size, rank * size + size)
        down = layer.mlp.down_proj.stored[0].form().dequantize()
        torch.testing.assert_close(down, whole["model.layers.1.mlp.down_proj.weight"][:, own])
        gate_up = torch.cat([whole[f"model.layers.1.mlp.{name}_proj.weight"][own] for name in ("gate", "up")])
        torch.testing.assert_close(layer.mlp.gate_up_proj.stored[0].form().dequantize(), gate_up)
        assert model.lm_head is not None
        assert model.lm_head.stored is not None
        rows = -(-257 // tp)
        head = whole["lm_head.weight"][rank * rows : rank * rows + rows]
        torch.testing.assert_close(model.lm_head.stored.form().dequantize(), head)


@pytest.mark.parametrize("pp", [2])
def test_stages_know_what_others_hold(tmp_path: Path, pp: int) -> None:
    directory = quantized(tiny_model("llama", num_hidden_layers=2), tmp_path / "model", skipped=[r"layers\.1\.mlp"])
    held = [set(state(fill(directory, ctx=ctx))) for ctx in contexts(directory, 1, pp)]
    assert "model.layers.0.mlp.gate_up_proj.codes" in held[0]
    assert "model.layers.1.mlp.gate_up_proj.weight" in held[1]


def test_sharded_state(tmp_path: Path) -> None:
    """Its files hold our own names: what the checkpoint called its modules comes along."""
    source = tiny_model("gpt_neox", **NEOX)
    linear = r"(query_key_value|dense\w*)\.weight$"
    directory = quantized(source, tmp_path / "model", linear=linear, skipped=["gpt_neox.layers.1.mlp"])
    save_sharded(EngineConfig(model=str(directory)), tmp_path / "sharded")
    check_logits(tmp_path / "sharded")


def test_an_update_in_place(tmp_path: Path) -> None:
    first = quantized(tiny_model("llama", seed=1), tmp_path / "old" / "model", head=True)
    driver = check_logits(first)
    second = quantized(tiny_model("llama"), tmp_path / "new" / "model", head=True)
    assert driver.worker._weights is not None
    weights = driver.worker._weights
    with torch.inference_mode():
        weights.sleep(2)
        weights.wake()
        weights.begin(whole=True)
        weights.load_directory(str(second))
        weights.finish(whole=True)
        expected = hf_model(second.parent / "judge")(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(driver, PROMPT), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, n: t.pop(f"{n}.inner.scales"), "the checkpoint lacks model.layers.0.mlp.down_proj.inner.scales"),
        (
            lambda t, n: t.update({f"{n}.codes": t[f"{n}.codes"][1:].clone()}),
            r"down_proj.codes .* has shape \[\d+, \d+\]",
        ),
        (lambda t, n: t.update({f"{n}.codes": t[f"{n}.codes"].float()}), "down_proj.codes .* holds float32"),
        (lambda t, n: t.update({f"{n}.more": t[f"{n}.codes"].clone()}), "unexpected model.layers.0.mlp.down_proj.more"),
    ],
    ids=["missing", "shape", "type", "unexpected"],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Callable[[Any, str], Any], message: str) -> None:
    directory = quantized(tiny_model("llama"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    change(tensors, "model.layers.0.mlp.down_proj")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Driver(str(directory), num_blocks=16)
