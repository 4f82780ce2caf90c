"""What a served model lets one HTTP request run at a time, and what its requests may ask for."""

from __future__ import annotations

from dataclasses import replace

from app.api.generation.served_models import load_served_model
from app.config.model import ModelConfig


def test_a_request_leaves_rows_to_others() -> None:
    model = load_served_model(ModelConfig(name="m"))
    rows = {8: 6, 4: 3, 2: 1, 1: 1}
    for num_rows, most in rows.items():
        known = replace(model, max_num_seqs=num_rows)
        assert known.max_running == most
        assert known.max_running_of_prompt == most
    two = replace(model, max_num_seqs=16, num_replicas=2)
    assert (two.max_running, two.max_running_of_prompt) == (12, 6)
    assert replace(model, max_num_seqs=None).max_running > 1 << 40


def test_its_bounds_are_those_of_the_model() -> None:
    model = load_served_model(ModelConfig(name="m"))
    known = replace(model, max_kv_tokens=7)
    assert model.bounds.max_total_tokens == model.max_model_len
    assert known.bounds.max_total_tokens == 7


def test_its_bounds_are_settled_once() -> None:
    model = load_served_model(ModelConfig(name="m"))
    before = model.bounds
    assert model.bounds is before
    model.max_kv_tokens = 7  # as an ingress learns it that opened without a replica
    assert model.bounds is not before
    assert model.bounds.max_total_tokens == 7
    assert replace(model, max_model_len=5).bounds.max_total_tokens == 5
