from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.adapters.adapter_config import AdapterConfig
from app.errors import CheckpointError, MantaError, UnsupportedError


def config(tmp_path: Path, **fields: Any) -> AdapterConfig:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", **fields}))
    return AdapterConfig.read(file)


def test_rank_and_factor_of_a_module(tmp_path: Path) -> None:
    plain = config(tmp_path, r=4, lora_alpha=6, rank_pattern={"q_proj": 16, r"layers\.1\..*": 2}, alpha_pattern={})
    assert plain.of_module("model.layers.0.mlp.up_proj") == (4, 1.5)
    assert plain.of_module("model.layers.1.self_attn.q_proj") == (16, 6 / 16), "the first pattern counts"
    assert plain.of_module("model.layers.1.mlp.up_proj") == (2, 3.0)
    assert plain.of_module("model.layers.0.xq_proj") == (4, 1.5), "a pattern begins behind a dot"
    stable = config(tmp_path, r=16, lora_alpha=8, use_rslora=True, alpha_pattern={"q_proj": 2})
    assert stable.of_module("a.k_proj") == (16, 2.0)
    assert stable.of_module("a.q_proj") == (16, 0.5)


def test_patterns_are_read_as_peft_reads_them(tmp_path: Path) -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key
    patterns = {"q_proj": 2, r"layers\.1\..*_proj": 3, "mlp.(up|down)_proj": 5, r"[kv]_proj": 6}
    own = config(tmp_path, r=9, rank_pattern=patterns)
    for module in ("q_proj", "layers.0.q_proj", "layers.1.k_proj", "layers.0.mlp.up_proj", "layers.0.v_proj", "o_proj"):
        assert own.of_module(module)[0] == patterns.get(get_pattern_key(list(patterns), module), 9), module


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True, "lora_bias": True}, "use_dora"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"spooky_option": {"x": 1}}, "spooky_option"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        config(tmp_path, **fields)


def test_settings_that_say_nothing_are_taken(tmp_path: Path) -> None:
    taken = config(
        tmp_path,
        use_dora=False, modules_to_save=None, layer_replication=None, init_lora_weights=True, bias="none",
        megatron_config=None, loftq_config={}, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_bias=False,
    )  # fmt: skip
    assert (taken.rank, taken.alpha) == (8, 8.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": 10**9}, "r is 1000000000"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"use_dora": 1}, "use_dora"),
        ({"modules_to_save": ["x"] * 65}, "modules_to_save"),
        ({"modules_to_save": [3]}, "modules_to_save"),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"rank_pattern": {"(a{1000}){1000}": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"(q_proj": 2}}, "alpha_pattern"),
        ({"alpha_pattern": {"q" * 300: 2}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        config(tmp_path, **fields)


def test_a_pattern_that_takes_for_ever_is_refused(tmp_path: Path) -> None:
    hostile = config(tmp_path, rank_pattern={"(a|b|ab)*(a|b|ab)*(c|d)": 2})
    with pytest.raises(MantaError, match="take too long"):
        hostile.of_module("ab" * 200)


def test_many_patterns_of_many_modules_have_one_time(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at most 256"):
        config(tmp_path, rank_pattern={f"x{number}": 2 for number in range(257)})
    slow = config(tmp_path, alpha_pattern={f"(a|b|ab)*(a|b|ab)*{number}x": 2 for number in range(256)})
    modules = [f"{'ab' * 12}{number}x{'ab' * 6}" for number in range(10_000)]
    with pytest.raises(MantaError, match="take too long"):
        list(map(slow.of_module, modules))
