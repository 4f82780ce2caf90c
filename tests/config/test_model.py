"""A served model's options."""

from __future__ import annotations

import pytest

from app.config.engine import EngineConfig
from app.config.model import ModelConfig


@pytest.mark.parametrize(("gpus", "whole_steps"), [(None, "auto"), (1, "auto"), (2, "auto"), (0.5, "off")])
def test_replicas_that_share_a_gpu_run_no_launches_of_all_layers(gpus: float | None, whole_steps: str) -> None:
    model = ModelConfig(name="a", gpus_per_worker=gpus, engine=EngineConfig(max_num_seqs=7))
    assert (model.run_engine.whole_steps, model.run_engine.max_num_seqs) == (whole_steps, 7)
    off = ModelConfig(name="a", gpus_per_worker=gpus, engine=EngineConfig(whole_steps="off"))
    assert off.run_engine.whole_steps == "off"
