"""Adapters in a worker's steps, judged by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.errors import InvalidRequestError
from app.records.adapter import AdapterAsk
from app.worker.lora.adapters import Adapters
from tests.adapters import peft_adapter, peft_logits
from tests.limits import wait_until
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.models.families.state_variants import STATE_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, all_logits, decode_statically, greedy

PROMPT = [5, 9, 200, 7, 3, 77, 130, 8, 21]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 100,
    "without": ["num_key_value_heads", "head_dim", "intermediate_size"],
}  # fmt: skip
NEOX = {"without": ["num_key_value_heads", "head_dim"], "num_attention_heads": 4, "max_position_embeddings": 128}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"r": 4, "lora_alpha": 6, "target_modules": [*ATTENTION, *MLP]}),
    "rslora": ("llama", {}, {"r": 20, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}),
    "patterns": (
        "qwen3",
        {},
        {
            "r": 3, "lora_alpha": 4, "target_modules": [*ATTENTION, *MLP], "layers_to_transform": [1],
            "rank_pattern": {"layers.1.self_attn.k_proj": 17, "up_proj": 2}, "alpha_pattern": {"(q|k)_proj": 9},
        },
    ),
    "fused": ("phi3", {"pad_token_id": 0}, {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "transposed": ("gpt2", GPT2, {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "interleaved": ("gpt_neox", NEOX, {"r": 4, "target_modules": ["query_key_value", "dense", "dense_h_to_4h"]}),
    "scaled sums": ("granite", {"residual_multiplier": 0.4}, {"r": 4, "target_modules": [*ATTENTION, *MLP]}),
    "two norms": ("gemma2", {"sliding_window": 9}, {"r": 4, "target_modules": [*ATTENTION, *MLP]}),
    "experts' attention": (*EXPERT_VARIANTS["mixtral"], {"r": 4, "target_modules": ATTENTION}),
    "recurrent": (
        *STATE_VARIANTS["qwen3_5"],
        {
            "r": 4,
            "target_modules": [*(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")), "out_proj", *ATTENTION, *MLP],
        },
    ),
    "latent": (
        *EXPERT_VARIANTS["deepseek_v3"],
        {"r": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
}  # fmt: skip


def load(driver: Driver, directory: Path) -> AdapterAsk:
    """Load an adapter into the driver's worker; what asks for it."""
    digest = AdapterFiles.read(directory, 64).digest()
    driver.worker.call_feature("read_adapter", str(directory), digest)
    wait_until(lambda: driver.worker.call_feature("adapter_is_read", digest))
    driver.worker.call_feature("fit_adapter", digest)
    return AdapterAsk(directory.name, digest)


def adapting(model: Path, **options: Any) -> Driver:
    return Driver(str(model), enable_lora=True, max_lora_rank=32, **{"max_loras": 3, "num_blocks": 64, **options})


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
    """Four of the tiny Llama, of several ranks."""
    root = tmp_path_factory.mktemp("adapters")
    targets = {"target_modules": [*ATTENTION, *MLP]}
    return [peft_adapter(tiny_model(), root / str(r), seed=r, scale=0.5, r=r, **targets) for r in (2, 8, 16, 24)]


def runs(asks: list[AdapterAsk | None], max_tokens: int = 6) -> list[Run]:
    """One request for each, of different prompts."""
    return [
        Run(
            [token + index for token in PROMPT[: 4 + index % 4]], greedy(max_tokens), asks=() if ask is None else (ask,)
        )
        for index, ask in enumerate(asks)
    ]


@pytest.mark.parametrize("static", [False, True])
def test_a_mixed_batch_equals_each_alone(adapters: list[Path], static: bool) -> None:
    driver = adapting(tiny_model(), chunk=5, max_loras=4)
    if static:
        step = decode_statically(driver.worker, [1, 4, 16])
        assert {frozenset[str](), frozenset({"lora"})} == {key.parts for key in step.keys}
    asks = [load(driver, adapter) for adapter in adapters]
    mixed = [None, asks[0], asks[1], None, asks[2], asks[3], asks[0], asks[2], None]
    together = driver.run(runs(mixed))
    for index, run in enumerate(runs(mixed)):
        assert driver.run([run])[0].tokens == together[index].tokens, index
    plain = Driver(str(tiny_model()), chunk=5, num_blocks=64)
    for index in (0, 3, 8):
        assert plain.run([runs(mixed)[index]])[0].tokens == together[index].tokens, "a base request changed"


def test_rows_without_an_adapter_have_the_same_bits_beside_others(adapters: list[Path]) -> None:
    """Logits of base rows in a batch are those of the same batch on a worker without adapters, bit for bit."""
    found = []
    for options in ({}, {"enable_lora": True, "max_lora_rank": 32}):
        driver = Driver(str(tiny_model()), num_blocks=64, **options)
        asks = [load(driver, adapters[1])] if options else [None]
        batch = runs([None, *asks, None, *asks])
        for run in batch:
            run.params = greedy(3, logprobs=5)
        found.append([driver.run(batch)[index].logprobs for index in (0, 2)])
    assert found[0] == found[1]


def test_slots_are_given_away_and_adapters_come_back(adapters: list[Path]) -> None:
    """More adapters than slots, one after the other and within one step message."""
    driver = adapting(tiny_model(), max_loras=1)
    asks = [load(driver, adapter) for adapter in adapters]
    first = [driver.run(runs([ask]))[0].tokens for ask in asks]
    assert len({tuple(tokens) for tokens in first}) == len(asks), "the adapters do not differ"
    for index in (2, 0, 3, 3, 1, 2):
        assert driver.run(runs([asks[index]]))[0].tokens == first[index]
    driver.worker.call_feature("drop_adapter", asks[2].digest)
    again = load(driver, adapters[2])
    assert driver.run(runs([again]))[0].tokens == first[2]


def held(driver: Driver) -> list[int]:
    """Bytes of host memory of each adapter that is loaded."""
    assert driver.worker._parts is not None
    (feature,) = (one for one in driver.worker._parts.features._all if isinstance(one, Adapters))
    assert [adapter.rows.nbytes for adapter in feature._loaded.values()] == list(feature._sizes.values())
    return list(feature._sizes.values())


def test_host_memory_holds_the_layers_alone_that_an_adapter_changes(tmp_path: Path) -> None:
    """In a slot nothing is left of the adapter before it."""
    model, config = tiny_model(), {"r": 20, "lora_alpha": 60}
    whole = peft_adapter(model, tmp_path / "whole", **config, target_modules=[*ATTENTION, *MLP])
    some = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}
    few = peft_adapter(model, tmp_path / "few", **config, **some)
    driver = adapting(model, max_loras=1)
    asks = [load(driver, path) for path in (whole, few)]
    assert 3 * held(driver)[1] < held(driver)[0]
    for _ in range(2):
        for ask, path in zip(asks, (whole, few), strict=True):
            own, truth = all_logits(driver, PROMPT, ask), peft_logits(model, path, PROMPT)
            assert (own - truth).abs().max() < 1e-4 * float(truth.abs().max())


def test_adapters_take_no_more_host_memory_than_they_may(adapters: list[Path]) -> None:
    """Of ranks 2, 8 and 16, which take a tile each, and 24, which takes two."""
    driver = adapting(tiny_model())
    load(driver, adapters[0])
    (own,) = held(driver)
    driver = adapting(tiny_model(), lora_host_memory_bytes=3 * own - 1)
    asks = [load(driver, adapter) for adapter in adapters[:2]]
    for adapter in adapters[2:]:
        with pytest.raises(InvalidRequestError, match="lora_host_memory_bytes"):
            load(driver, adapter)
    driver.worker.call_feature("drop_adapter", asks[0].digest)
    load(driver, adapters[2])
    with pytest.raises(InvalidRequestError, match="lora_host_memory_bytes"):
        load(driver, adapters[3])
