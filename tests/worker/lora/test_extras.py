"""What adapters have beside matrices of linear layers, judged by PEFT: DoRA, biases, embeddings, heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.engine import control
from app.errors import CheckpointError, MantaError, UnsupportedError
from app.records.adapter import AdapterAsk
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from tests.adapters import peft_adapter, peft_logits
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_encoders import hf_encoder, tiny_encoder
from tests.tiny_models import tiny_model
from tests.worker.lora.test_adapters import ATTENTION, GPT2, MLP, NEOX, PROMPT, load, runs
from tests.worker.pooling.pooling_driver import PoolingDriver
from tests.worker.worker_driver import Driver, all_logits, decode_statically, greedy

ENDS = ["embed_tokens", "lm_head"]
TIED = {"tie_word_embeddings": True}
DORA = {"use_dora": True}
LINEAR = [*ATTENTION, *MLP]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", {}, {"r": 4, **DORA, "target_modules": LINEAR}),
    "dora of biased layers": ("qwen2", {}, {"r": 20, **DORA, "use_rslora": True, "target_modules": LINEAR}),
    "dora of fused layers": (
        "phi3", {"pad_token_id": 0}, {"r": 4, **DORA, "target_modules": ["qkv_proj", "gate_up_proj"]},
    ),
    "dora of interleaved layers": ("gpt_neox", NEOX, {"r": 4, **DORA, "target_modules": ["query_key_value", "dense"]}),
    "dora of transposed layers": (
        "gpt2", GPT2, {"r": 4, **DORA, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "dora and scaled sums": (
        "granite", {"residual_multiplier": 0.4}, {"r": 4, **DORA, "target_modules": ["o_proj", "down_proj"]},
    ),
    "dora and two norms": ("gemma2", {"sliding_window": 9}, {"r": 4, **DORA, "target_modules": LINEAR}),
    "dora of latents": (
        *EXPERT_VARIANTS["deepseek_v3"],
        {"r": 4, **DORA, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
    "second biases": (
        "qwen2", {}, {"r": 4, "lora_alpha": 9, "lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    ),
    "biases of its layers": ("qwen2", {}, {"r": 4, "bias": "lora_only", "target_modules": ["q_proj", "o_proj"]}),
    "all biases": ("qwen2", {}, {"r": 4, "bias": "all", **DORA, "target_modules": ["k_proj", "up_proj"]}),
    "embedding": ("llama", {}, {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "scaled embedding": ("gemma", {}, {"r": 4, "target_modules": ["embed_tokens"]}),
    "head": ("llama", {}, {"r": 20, "target_modules": ["lm_head", "v_proj"]}),
    "tied ends": ("llama", TIED, {"r": 4, "target_modules": [*ENDS, "o_proj"]}),
    "dora of the ends": ("llama", {}, {"r": 4, **DORA, "target_modules": ENDS}),
    "soft cap": ("gemma2", {"sliding_window": 9, **TIED}, {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
}  # fmt: skip


def adapting(model: Path, **options: Any) -> Driver:
    own = {"max_loras": 3, "num_blocks": 64, **options}
    return Driver(str(model), enable_lora=True, max_lora_rank=32, lora_extras=True, **own)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_pefts(tmp_path: Path, kind: str) -> None:
    family, changes, config = KINDS[kind]
    model = tiny_model(family, **changes)
    adapter = peft_adapter(model, tmp_path, **config)
    driver = adapting(model, chunk=5)
    ask = load(driver, adapter)
    own, base = all_logits(driver, PROMPT, ask), all_logits(driver, PROMPT)
    truth = peft_logits(model, adapter, PROMPT)
    scale = float(truth.abs().max())
    assert (own - truth).abs().max() < 1e-4 * max(1.0, scale)
    assert (own - base).abs().max() > 1e-2 * scale, "the adapter does nothing"
    driver.worker.shutdown()
    assert torch.equal(base, all_logits(Driver(str(model), num_blocks=64, chunk=5), PROMPT))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one model, of several kinds."""
    root, model = tmp_path_factory.mktemp("extras"), tiny_model("qwen2")
    kinds: list[dict[str, Any]] = [
        {"r": 8, "target_modules": [*ATTENTION, *MLP]},
        {"r": 4, **DORA, "bias": "lora_only", "target_modules": [*ATTENTION, *MLP]},
        {"r": 20, "target_modules": [*ENDS, "q_proj"]},
    ]
    return [peft_adapter(model, root / str(seed), seed, 0.4, **kind) for seed, kind in enumerate(kinds)]


@pytest.mark.parametrize("static", [False, True])
def test_a_mixed_batch_equals_each_alone(adapters: list[Path], static: bool) -> None:
    """One slot too few for all of them: each is what it was alone, and base rows are those of a worker without any."""
    model = tiny_model("qwen2")
    driver = adapting(model, chunk=5)
    if static:
        decode_statically(driver.worker, [1, 4, 16])
    asks = [load(driver, adapter) for adapter in adapters]
    mixed = [None, asks[0], asks[1], None, asks[2], asks[1], asks[0], asks[2], None]
    batch = runs(mixed)
    for run in batch:
        run.params = greedy(6, logprobs=5)
    together = driver.run(batch)
    assert len({tuple(one.tokens) for one in together}) > 6, "the adapters do not differ"
    for index, run in enumerate(runs(mixed)):
        assert driver.run([run])[0].tokens == together[index].tokens, index
    plain = Driver(str(model), chunk=5, num_blocks=64)
    alike = runs([None] * len(mixed))
    for run in alike:
        run.params = greedy(1, logprobs=5)
    base = plain.run(alike)
    for index in (0, 3, 8):
        assert base[index].tokens == together[index].tokens[:1]
        assert base[index].logprobs == together[index].logprobs[:1], "a base request changed"


def test_prompt_logprobs_are_the_heads(adapters: list[Path]) -> None:
    driver, model = adapting(tiny_model("qwen2"), chunk=4), tiny_model("qwen2")
    ask = load(driver, adapters[2])
    run, beside = runs([ask, None])
    run.prompt, run.params = PROMPT, greedy(1, prompt_logprobs=1)
    driver.run([beside, run])
    truth = peft_logits(model, adapters[2], PROMPT).log_softmax(-1)
    found = [entry.logprobs[0] for entry in run.prompt_logprobs]
    expected = [float(truth[place, token]) for place, token in enumerate(PROMPT[1:])]
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_norms_follow_the_base_models_weights(adapters: list[Path], tmp_path: Path) -> None:
    """A weight that is replaced under an adapter changes what DoRA's magnitudes are divided by."""
    model = tiny_model("qwen2")
    driver = adapting(model)
    ask = load(driver, adapters[1])
    before = all_logits(driver, PROMPT, ask)
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(model / "model.safetensors")
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (other / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor * (3.0 if "o_proj" in name else 1.0) for name, tensor in tensors.items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    driver.worker.begin_update(True)
    driver.worker.load_directory(str(other))
    driver.worker.finish_update(True)
    after = all_logits(driver, PROMPT, ask)
    truth = peft_logits(other, adapters[1], PROMPT)
    assert (after - truth).abs().max() < 1e-4 * max(1.0, float(truth.abs().max()))
    assert not torch.allclose(after, before, atol=1e-2)


def test_without_the_option_they_are_refused_by_its_name(adapters: list[Path]) -> None:
    driver = Driver(str(tiny_model("qwen2")), enable_lora=True, max_lora_rank=32, num_blocks=64)
    load(driver, adapters[0])
    for adapter in adapters[1:]:
        with pytest.raises(UnsupportedError, match="lora_extras"):
            load(driver, adapter)


def _changed(adapter: Path, directory: Path, name: str, tensor: torch.Tensor | None) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    full = f"base_model.model.{name}"
    if tensor is None:
        del tensors[full]
    else:
        tensors[full] = tensor
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("number", "name", "tensor", "message"),
    [
        (1, f"{QUERY}.lora_magnitude_vector", torch.ones(63), "its magnitude has 63 rows; the layer has 64"),
        (1, f"{QUERY}.lora_magnitude_vector", None, "use_dora=True"),
        (1, f"{QUERY}.lora_magnitude_vector", torch.full((64,), torch.nan), "its magnitude holds numbers"),
        (1, "model.layers.0.mlp.up_proj.base_layer.bias", torch.ones(112), "a bias for a layer that has none"),
        (0, f"{QUERY}.lora_magnitude_vector", torch.ones(64), "use_dora=False"),
        (0, f"{QUERY}.base_layer.bias", torch.ones(64), "no tensor of a LoRA adapter"),
        (2, f"{QUERY}.base_layer.weight", torch.ones(64, 64), "a whole matrix beside"),
        (2, "model.embed_tokens.base_layer.weight", torch.ones(331, 64), "is not the base model's"),
        (2, "model.embed_tokens.lora_embedding_A", torch.ones(20, 330), "for 330 inputs and 64 outputs"),
        (2, "model.embed_tokens.lora_embedding_B", None, "lora_embedding_B is missing"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    adapters: list[Path], tmp_path: Path, number: int, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(MantaError, match=message):
        load(adapting(tiny_model("qwen2")), _changed(adapters[number], tmp_path / "a", name, tensor))


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_a_classifiers_head_is_the_adapters(family: str, tmp_path: Path) -> None:
    """Beside requests without it; the whole matrix that PEFT saved, and what else it changed."""
    from peft import PeftModel

    model, targets = tiny_encoder(family, num_labels=3), ["q_proj", "v_proj"] if family == "qwen3" else ["query"]
    kind: dict[str, Any] = {"task_type": "SEQ_CLS", "r": 4, "target_modules": targets}
    adapter = peft_adapter(model, tmp_path / "a", base=hf_encoder(model, classifies=True), **kind)
    prompts = [[5, 9, 20, 7], [8, 21, 13], [6, 6, 7, 30, 11], [12, 10]]
    options = {"enable_lora": True, "lora_extras": True, "max_num_batched_tokens": 256}
    with PoolingDriver(model, **options) as driver:
        digest = control.run(driver.core, "load_adapter", {"name": "a", "path": str(adapter)})
        ask = AdapterAsk("a", bytes.fromhex(digest))
        params = PoolingParams(task="classify", use_activation=False)
        for number, prompt in enumerate(prompts):
            asks = (ask,) if number % 2 else ()
            driver.core.add_request(EngineRequest(str(number), prompt, params, asks=asks))
        found: dict[str, Any] = {}
        while driver.core.has_work():
            for output in driver.core.step():
                assert output.pooled is not None, output.error
                found[output.request_id] = output.pooled.array()
    judges = hf_encoder(model, classifies=True), PeftModel.from_pretrained(hf_encoder(model, classifies=True), adapter)
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            exact = judges[number % 2].eval()(torch.tensor([prompt])).logits[0].numpy()
            np.testing.assert_allclose(found[str(number)], exact, atol=1e-4 * max(1.0, np.abs(exact).max()))


@pytest.mark.parametrize(("saved", "name"), [("lm_head", "lm_head"), ("embed_tokens", "model.embed_tokens")])
def test_whole_tables_are_refused(tmp_path: Path, saved: str, name: str) -> None:
    model = tiny_model("qwen2")
    adapter = peft_adapter(model, tmp_path, r=4, target_modules=["q_proj"], modules_to_save=[saved])
    message = f"modules_to_save: {name} is held whole, with 331 outputs: a slot has room for .* no whole table"
    with pytest.raises(UnsupportedError, match=message):
        load(adapting(model), adapter)
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{saved}"', '"other"'))
    with pytest.raises(CheckpointError, match="no tensor of a LoRA"):
        load(adapting(model), adapter)
