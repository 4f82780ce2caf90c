"""Which layers a stage holds, and what is refused before any worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.records.parallel_plan import check_backend_sizes, check_parallel_sizes, layout_flags, stage_layers


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(8, 2, [4, 4]), (7, 2, [4, 3]), (8, 3, [3, 3, 2]), (10, 4, [2, 3, 3, 2]), (5, 5, [1] * 5), (3, 1, [3])],
)
def test_even_partition_favours_the_middle(num_layers: int, num_stages: int, expected: list[int]) -> None:
    stages = stage_layers(num_layers, num_stages)
    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_a_given_partition() -> None:
    assert stage_layers(8, 3, (1, 5, 2)) == [range(0, 1), range(1, 6), range(6, 8)]
    for wrong in ((1, 5, 3), (0, 6, 2), (8,)):
        with pytest.raises(ConfigError, match="does not split 8 layers into 3 stages") as caught:
            stage_layers(8, 3, wrong)
        assert caught.value.param == "pipeline_partition"
    with pytest.raises(ConfigError, match="pipeline_parallel_size=9 is more than the model's 8 layers"):
        stage_layers(8, 9)


def info(**changes: Any) -> ModelInfo:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    return ModelInfo(Path("fake"), {**sizes, "intermediate_size": 96, **changes}, {})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sizes_that_divide(tp: int) -> None:
    check_parallel_sizes(EngineConfig(tensor_parallel_size=tp, pipeline_parallel_size=2), info())


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_attention_heads": 6}, 4, "does not divide num_attention_heads=6"),
        ({"intermediate_size": 90}, 4, "does not divide intermediate_size=90"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "nor a multiple of num_key_value_heads=3"),
    ],
)
def test_sizes_that_do_not_divide_are_named(changes: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_parallel_sizes(EngineConfig(tensor_parallel_size=tp), info(**changes))
    assert caught.value.param == "tensor_parallel_size"


EXPERTS = {"num_experts": 6, "moe_intermediate_size": 30, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 2, "the model has no experts"),
        (EXPERTS, 1, "there is one GPU; set tensor_parallel_size"),
        ({**EXPERTS, "num_experts": 2}, 4, "tensor_parallel_size=4 is more than the model's 2 experts"),
    ],
)
def test_whole_experts_are_refused_by_name(changes: dict[str, Any], tp: int, message: str) -> None:
    config = EngineConfig(tensor_parallel_size=tp, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=message) as caught:
        check_parallel_sizes(config, info(**changes))
    assert caught.value.param == "enable_expert_parallel"


BALANCED = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}


@pytest.mark.parametrize("check", [check_parallel_sizes, check_backend_sizes])
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"eplb_window_size": 10}, "eplb_window_size"),
        ({"eplb_window_size": 4000}, "eplb_window_size"),
        ({"eplb_step_interval": 10}, "eplb_step_interval"),
        ({"num_redundant_experts": 1}, "num_redundant_experts"),
        ({"enable_eplb": True}, "enable_eplb"),
    ],
)
def test_no_option_of_moving_experts_is_ignored(check: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError, match=f"^{param}(=[0-9]+)? needs enable_e") as caught:
        check(EngineConfig(**options), info(**EXPERTS))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"cpu_offload_gb": 2.5}, "enable_eplb", "cpu_offload_gb=2.5 keeps them in host memory"),
        ({"num_redundant_experts": 7}, "num_redundant_experts", "is more than 6: all experts on every GPU"),
        ({"eplb_step_interval": 9}, "eplb_window_size", "eplb_window_size=1000 is more than eplb_step_interval=9"),
    ],
)
def test_experts_that_cannot_move_are_refused(options: dict[str, Any], param: str, message: str) -> None:
    check_parallel_sizes(EngineConfig(**BALANCED), info(**EXPERTS))
    with pytest.raises(ConfigError, match=message) as caught:
        check_parallel_sizes(EngineConfig(**BALANCED, **options), info(**EXPERTS))
    assert caught.value.param == param


def test_widths_of_experts_must_divide_unless_they_are_whole() -> None:
    whole, share = (EngineConfig(tensor_parallel_size=4, enable_expert_parallel=one) for one in (True, False))
    check_parallel_sizes(whole, info(**EXPERTS))
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 does not divide moe_intermediate_size=30"):
        check_parallel_sizes(share, info(**EXPERTS))
    shared = {**EXPERTS, "shared_expert_intermediate_size": 50}
    with pytest.raises(ConfigError, match="does not divide shared_expert_intermediate_size=50"):
        check_parallel_sizes(whole, info(**shared))


def test_steps_in_flight_follow_the_stages_unless_given() -> None:
    assert EngineConfig().max_inflight_steps == 2
    assert EngineConfig(pipeline_parallel_size=4).max_inflight_steps == 5
    assert EngineConfig(pipeline_parallel_size=4, max_inflight_steps=1).max_inflight_steps == 1


def test_one_process_runs_one_rank() -> None:
    with pytest.raises(ValueError, match="use local_processes or ray_workers"):
        EngineConfig(executor="in_process", tensor_parallel_size=2)


def test_a_layout_on_the_command_line() -> None:
    """What a server of weights that were cut for it is to be started with."""
    assert layout_flags(EngineConfig(model="m")) == "--tensor-parallel-size 1"
    balanced = {"enable_expert_parallel": True, "enable_eplb": True, "num_redundant_experts": 4}
    assert layout_flags(EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3, **balanced)) == (
        "--tensor-parallel-size 2 --pipeline-parallel-size 3 --enable-expert-parallel --enable-eplb"
        " --num-redundant-experts 4"
    )
