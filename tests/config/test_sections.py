"""Sections of the configuration refuse what contradicts itself, and name the option at fault."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from app.config.admin import AdminConfig
from app.config.admission import AdmissionConfig
from app.config.autoscaling import AutoscalingConfig
from app.config.engine import EngineConfig
from app.config.frozen import Frozen
from app.config.model import ModelConfig
from app.config.serve import ServeConfig

REFUSED: tuple[tuple[type[Frozen], dict[str, Any], str], ...] = (
    (AdmissionConfig, {"bulk": {"share": 0.9}}, "the shares of interactive, default, bulk are"),
    (AdmissionConfig, {"default_timeout_s": 9e9}, "exceeds max_timeout_s"),
    (
        AdmissionConfig,
        {"tenants": {"t": {"service_class": "interactive", "best_class": "bulk"}}},
        "service_class=interactive is better than best_class=bulk",
    ),
    (AutoscalingConfig, {"min_replicas": 3, "max_replicas": 2}, "min_replicas: 3 is more than max_replicas=2"),
    (AutoscalingConfig, {"max_replicas": 2, "initial_replicas": 3}, "initial_replicas: 3 is not within"),
    (AutoscalingConfig, {"max_replicas": 2, "floor_by_hour": {8: 4}}, "floor_by_hour: 4 from 8 o'clock"),
    (EngineConfig, {"lora_experts": True, "enable_eplb": True}, "experts that move"),
    (EngineConfig, {"lora_experts": True}, "lora_experts: enable_lora is off"),
    (EngineConfig, {"lora_extras": True}, "lora_extras: enable_lora is off"),
    (EngineConfig, {"lora_shared_experts": True}, "lora_shared_experts: enable_lora is off"),
    (EngineConfig, {"executor": "in_process", "tensor_parallel_size": 2}, "use local_processes or ray_workers"),
    (ModelConfig, {"name": "m", "num_replicas": 2, "autoscaling": {"max_replicas": 3}}, "autoscaling chooses it"),
    (ModelConfig, {"name": "m", "adapter_resolver": "directory"}, "adapter_resolver: engine.enable_lora is off"),
    (
        ModelConfig,
        {"name": "m", "adapter_directory": "/a", "engine": {"enable_lora": True}},
        "adapter_resolver and adapter_directory: give both",
    ),
    (ServeConfig, {"models": [{"name": "m"}, {"name": "n", "aliases": ["m"]}]}, "the name 'm' is used twice"),
)


@pytest.mark.parametrize(("section", "values", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_contradictions(section: type[Frozen], values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        section.model_validate(values)


@pytest.mark.parametrize("section", [AdminConfig, AdmissionConfig, EngineConfig])
def test_sections_are_closed_and_do_not_change(section: type[Frozen]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        section.model_validate({"no_such_option": 1})
    name, value = next(iter(section()))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(section(), name, value)


@pytest.mark.parametrize(
    ("values", "served"),
    [
        ({"engine": {"model": "tiny-chat", "enable_lora": True}}, {"tiny-chat-pirate": "tiny-chat-pirate"}),
        ({"engine": {"model": "tiny-chat", "enable_lora": True}, "adapters": {"a": "/b"}}, {"a": "/b"}),
        ({"engine": {"model": "tiny-chat"}}, {}),
        ({"engine": {"model": "/other", "enable_lora": True}}, {}),
    ],
)
def test_the_built_in_model_is_served_with_its_adapter(values: dict[str, Any], served: dict[str, str]) -> None:
    model = ModelConfig.model_validate({"name": "m", **values})
    assert model.served_adapters == served
    with pytest.raises(ValidationError, match="is used twice") if served else nullcontext():
        ServeConfig(models=[model, ModelConfig(name=next(iter(served), "n"))])
