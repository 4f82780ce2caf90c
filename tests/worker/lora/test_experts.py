"""Adapters of experts in both layouts that PEFT has published, judged by PEFT: a pair for each expert (before
transformers 5), and one for all experts of a parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from app.errors import MantaError
from tests.adapters import pair, peft_adapter, peft_logits, write_adapter
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.quantization.stored_forms import FORMS
from tests.tiny_media import media_judge, tiny_media_model
from tests.tiny_models import hf_model, tiny_model
from tests.worker.lora.test_adapters import ATTENTION, PROMPT, load, runs
from tests.worker.worker_driver import Driver, all_logits, decode_statically

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": BOTH}),
    "two tiles": ("qwen3_moe", {"r": 20, "target_modules": ATTENTION, "target_parameters": BOTH}),
    "one parameter": (
        "qwen3_moe",
        {"r": 4, "use_rslora": True, "target_modules": [], "target_parameters": ["experts.down_proj"]},
    ),
    "the other parameter": ("olmoe", {"r": 3, "target_modules": [], "target_parameters": ["gate_up_proj"]}),
    "patterns": (
        "mixtral",
        {"r": 4, "target_modules": [], "target_parameters": BOTH, "rank_pattern": {"experts.gate_up_proj": 7}},
    ),
    # Families whose checkpoints hold experts in one tensor themselves.
    "rows in turn": ("gpt_oss", {"r": 4, "target_modules": ["q_proj"], "target_parameters": BOTH}),
    "swapped": (
        "llama4",
        {
            "r": 4,
            "target_modules": ["o_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "beside shared ones": (
        "deepseek_v3",
        {"r": 4, "target_modules": ["gate_proj", "up_proj", "o_proj"], "target_parameters": BOTH},
    ),
}
SHARED = {"r": 4, "lora_alpha": 6, "target_modules": r".*\.shared_expert\.(gate|up|down)_proj"}
NAMES = {
    "mixtral": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3 block_sparse_moe.experts.{}.w2",
    "qwen3_moe": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj",
}


def adapting(model: Path, **options: Any) -> Driver:
    own = {"max_loras": 3, "num_blocks": 64, **options}
    return Driver(str(model), enable_lora=True, max_lora_rank=32, lora_experts=True, **own)


def apart(family: str, directory: Path, seed: int = 0) -> Path:
    """An adapter with a pair for each expert."""
    torch.manual_seed(seed)
    names = NAMES[family].split()
    tensors: dict[str, torch.Tensor] = {}
    own = EXPERT_VARIANTS[family][1]
    width, count = own.get("moe_intermediate_size", 112), own.get("num_local_experts") or own["num_experts"]
    for layer in range(2):
        for expert in range(count):
            for name, (size_in, size_out) in zip(names, ((64, width), (64, width), (width, 64)), strict=True):
                module = f"model.layers.{layer}.{name.format(expert)}"
                tensors |= {
                    key: 0.3 * tensor for key, tensor in pair(module, size_in=size_in, size_out=size_out).items()
                }
    targets = [name.rpartition(".")[2] for name in names]
    return write_adapter(directory, tensors, target_modules=targets, task_type="CAUSAL_LM")


def check(model: Path, adapter: Path, *, is_bit_equal: bool = True) -> None:
    driver = adapting(model, chunk=5)
    ask = load(driver, adapter)
    own, base = all_logits(driver, PROMPT, ask), all_logits(driver, PROMPT)
    truth = peft_logits(model, adapter, PROMPT)
    scale = float(truth.abs().max())
    assert (own - truth).abs().max() < 1e-4 * max(1.0, scale)
    assert (own - base).abs().max() > 1e-2 * scale, "the adapter does nothing"
    driver.worker.shutdown()
    plain = all_logits(Driver(str(model), num_blocks=64, chunk=5), PROMPT)
    if is_bit_equal:
        assert torch.equal(base, plain)
    else:
        torch.testing.assert_close(base, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", STACKED)
def test_logits_are_pefts(tmp_path: Path, kind: str) -> None:
    variant, config = STACKED[kind]
    family, changes = EXPERT_VARIANTS[variant]
    model = tiny_model(family, **changes)
    # Shared experts that adapters may change are summed up apart from the others.
    check(model, peft_adapter(model, tmp_path, **config), is_bit_equal=variant != "deepseek_v3")


def test_logits_are_pefts_where_checkpoints_hold_inputs_first(tmp_path: Path) -> None:
    """Qwen3-VL: in one tensor, which transformers turns round as it reads it."""
    model = tiny_media_model("qwen3_vl_moe")
    config = {"r": 4, "target_modules": r".*language_model.*\.q_proj", "target_parameters": BOTH}
    judge = media_judge.__wrapped__  # one that is nobody else's: PEFT changes it
    adapter = peft_adapter(model, tmp_path, base=judge(model), **config)
    adapted: Any = PeftModel.from_pretrained(judge(model), adapter).eval()
    with torch.inference_mode():
        truth = adapted(input_ids=torch.tensor([PROMPT])).logits[0]
    driver = adapting(model, chunk=5)
    own = all_logits(driver, PROMPT, load(driver, adapter))
    assert (own - truth).abs().max() < 1e-4 * max(1.0, float(truth.abs().max()))


@pytest.mark.parametrize("variant", NAMES)
def test_logits_of_a_pair_for_each_expert_are_pefts(tmp_path: Path, variant: str) -> None:
    family, changes = EXPERT_VARIANTS[variant]
    check(tiny_model(family, **changes), apart(variant, tmp_path))


@pytest.mark.parametrize("static", [False, True])
def test_a_mixed_batch_equals_each_alone(tmp_path: Path, static: bool) -> None:
    family, changes = EXPERT_VARIANTS["qwen3_moe"]
    model = tiny_model(family, **changes)
    driver = adapting(model, chunk=5)
    if static:
        decode_statically(driver.worker, [1, 4, 16])
    config = STACKED["two tiles"][1]
    paths = [peft_adapter(model, tmp_path / "a", 1, 0.5, **config), apart("qwen3_moe", tmp_path / "b")]
    paths.append(peft_adapter(model, tmp_path / "c", 2, 0.5, r=4, target_modules=["q_proj"]))
    asks = [load(driver, path) for path in paths]
    mixed = [None, asks[0], asks[1], None, asks[2], asks[1], asks[0], asks[2], None]
    together = driver.run(runs(mixed))
    assert len({tuple(one.tokens) for one in together}) > 6, "the adapters do not differ"
    for index, run in enumerate(runs(mixed)):
        assert driver.run([run])[0].tokens == together[index].tokens, index
    plain = Driver(str(model), chunk=5, num_blocks=64)
    for index in (0, 3, 8):
        assert plain.run([runs(mixed)[index]])[0].tokens == together[index].tokens, "a base request changed"


def changed(adapter: Path, directory: Path, ending: str, make: Any) -> Path:
    """The adapter with tensors of such names made anew; None: they are left out."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    made = {name: make(tensor) if name.endswith(ending) else tensor for name, tensor in tensors.items()}
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    kept = {name: tensor for name, tensor in made.items() if tensor is not None}
    save_file(kept, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("ending", "make", "message"),
    [
        ("base_layer.lora_B.weight", lambda x: x[:-2].clone(), "for 64 inputs and 111 outputs; the layer"),
        ("experts.lora_A.weight", lambda x: x[:-1].clone(), "down_proj: lora_A is"),
        ("experts.lora_A.weight", lambda x: x[:, 1:].clone(), "for 111 inputs"),
        ("experts.lora_B.weight", lambda x: None, "down_proj.lora_B.weight is missing"),
        ("experts.lora_B.weight", lambda x: x * torch.nan, "lora_B.weight holds numbers that are none"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, ending: str, make: Any, message: str) -> None:
    variant, config = STACKED["mixtral"]
    family, changes = EXPERT_VARIANTS[variant]
    model = tiny_model(family, **changes)
    adapter = peft_adapter(model, tmp_path / "whole", **config)
    with pytest.raises(MantaError, match=message):
        load(adapting(model), changed(adapter, tmp_path / "a", ending, make))


@pytest.mark.parametrize(
    ("kind", "count", "own"), [("mixtral", 4, 5), ("mixtral", 6, 5), ("rows in turn", 9, 6), ("swapped", 2, 4)]
)
def test_another_number_of_experts_is_refused(tmp_path: Path, kind: str, count: int, own: int) -> None:
    variant, config = STACKED[kind]
    family, changes = EXPERT_VARIANTS[variant]
    other = tiny_model(family, **{**changes, "num_local_experts": count})
    adapter = peft_adapter(other, tmp_path, **config)
    with pytest.raises(MantaError, match=rf"_proj: its matrices are for {count} experts; the layer has {own}"):
        load(adapting(tiny_model(family, **changes)), adapter)


def test_an_adapter_that_swaps_nothing_is_taken_where_sizes_say_so(tmp_path: Path) -> None:
    """What PEFT wrote for Llama 4 before it swapped: the same product by its matrices the other way round."""
    family, changes = EXPERT_VARIANTS["llama4"]
    model = tiny_model(family, **changes)
    swapped = peft_adapter(model, tmp_path / "a", **STACKED["swapped"][1])
    tensors = load_file(swapped / "adapter_model.safetensors")
    rank = STACKED["swapped"][1]["r"]
    for name in [name for name in tensors if "experts" in name and name.endswith("lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        first, second = tensors[name], tensors[other]
        experts = len(first) // rank
        tensors[name] = second.unflatten(1, (rank, experts)).permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = first.unflatten(0, (experts, rank)).permute(2, 1, 0).flatten(1).contiguous()
    config = json.loads((swapped / "adapter_config.json").read_text())
    plain = write_adapter(tmp_path / "b", tensors, **config)
    driver = adapting(model)
    found = [all_logits(driver, PROMPT, load(driver, path)) for path in (swapped, plain)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_magnitudes_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    family, changes = EXPERT_VARIANTS["mixtral"]
    adapter = apart("mixtral", tmp_path / "a")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_B.weight")]:
        tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(len(tensors[name]))
    config = {**json.loads((adapter / "adapter_config.json").read_text()), "use_dora": True}
    driver, both = (
        adapting(tiny_model(family, **changes), lora_extras=True),
        write_adapter(tmp_path / "b", tensors, **config),
    )
    with pytest.raises(MantaError, match=r"experts\.0\.w1.*experts"):
        load(driver, both)
    with pytest.raises(ValueError, match="does not work with use_dora"):  # PEFT's judgment, which makes none either
        PeftModel.from_pretrained(hf_model(tiny_model(family, **changes)), both)


def test_without_the_option_they_are_refused_by_its_name(tmp_path: Path) -> None:
    family, changes = EXPERT_VARIANTS["mixtral"]
    driver = Driver(str(tiny_model(family, **changes)), enable_lora=True, num_blocks=64)
    with pytest.raises(MantaError, match=r"experts.0.w1: LoRA on experts: start the engine with lora_experts"):
        load(driver, apart("mixtral", tmp_path))


@pytest.mark.parametrize("form", ["plain", "fp8-block"])
def test_experts_that_all_tokens_share_are_changed_where_an_option_says_so(tmp_path: Path, form: str) -> None:
    """As wide as the others and stored as they are, so that they would lie among them."""
    family, changes = EXPERT_VARIANTS["qwen2_moe"]
    model = judge = tiny_model(family, **{**changes, "shared_expert_intermediate_size": 48})
    if form != "plain":
        model = FORMS[form].write(judge, tmp_path)
        judge = model.parent / "judge"
    adapter = peft_adapter(judge, tmp_path / "adapter", **SHARED)
    options = {"enable_lora": True, "max_lora_rank": 4, "num_blocks": 64}
    with pytest.raises(MantaError, match=r"shared_expert.*: LoRA on experts that all tokens share.*lora_shared_exp"):
        load(Driver(str(model), **options), adapter)
    driver = Driver(str(model), lora_shared_experts=True, **options)
    truth = peft_logits(judge, adapter, PROMPT)
    with torch.inference_mode():
        before = hf_model(judge)(torch.tensor([PROMPT])).logits[0]
    own, base = all_logits(driver, PROMPT, load(driver, adapter)), all_logits(driver, PROMPT)
    error, rounding = ((found - true).norm() / true.norm() for found, true in ((own, truth), (base, before)))
    assert error < 1e-5 + 3 * rounding, "activations are rounded in fp8 blocks"
    assert (own - base).norm() > 2 * (own - truth).norm(), "the adapter does nothing"
