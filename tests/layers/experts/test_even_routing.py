"""Benchmarks may impose even routing on the gates of any model: another choice, with the weights of the gate's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from app.engine.executor.worker_group_executor import WorkerGroupExecutor
from app.kernels.moe import MOE_OPS
from app.layers.context import ForwardContext
from app.layers.experts.gate import Gate
from benchmarks.even_routing import route_evenly
from tests.layers.experts.test_expert_mlp import SETTINGS, C, E, context

TOKENS = 700


def test_a_gate_that_was_evened_out_sends_as_many_tokens_to_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    step = cast("ForwardContext", SimpleNamespace(slot_mapping=torch.arange(TOKENS)))
    plain = Gate(context(), C, SETTINGS, num_shared=1)
    with torch.no_grad():
        plain.multiplier.zero_()
        plain.multiplier[0] = 1.0  # as random weights do: one expert is everybody's
    x = torch.rand(TOKENS, C, generator=torch.Generator().manual_seed(0))
    uneven = plain.choose(x, step)
    assert torch.bincount(uneven.ids[:, : SETTINGS.rule.top_k].flatten(), minlength=E).max() == TOKENS

    monkeypatch.setattr(MOE_OPS, "on", MOE_OPS.on)
    monkeypatch.setattr(WorkerGroupExecutor, "__init__", WorkerGroupExecutor.__init__)
    route_evenly()
    gate = Gate(context(), C, SETTINGS, num_shared=1)
    gate.load_state_dict(plain.state_dict())
    routing = gate.choose(x, step)
    chosen = routing.ids[:, : SETTINGS.rule.top_k]
    counts = torch.bincount(chosen.flatten(), minlength=E)
    even = TOKENS * SETTINGS.rule.top_k / E
    assert (counts > 0.8 * even).all()
    assert (counts < 1.2 * even).all()
    assert all(len(set(row)) == len(row) for row in chosen.tolist()), "no expert twice"
    assert (routing.ids[:, SETTINGS.rule.top_k :] == E).all(), "what is shared, everybody goes to"
    assert torch.equal(routing.weights, uneven.weights)
