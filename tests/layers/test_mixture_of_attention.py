"""A mixture of attention heads where the gate has not written its choice. What it computes: test_families.py."""

from __future__ import annotations

from typing import Any

import pytest

from app.layers.mixture_of_attention import MixtureOfAttention
from tests.models.families.test_families import VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, greedy


@pytest.mark.parametrize("found", [1 << 30, -5])
def test_experts_that_nobody_has_written_are_not_looked_for(found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's start compiles kernels without running them: then memory holds whatever was there."""
    family, changes = VARIANTS["jetmoe"]
    driver = Driver(str(tiny_model(family, **changes)), max_model_len=64)
    forward = MixtureOfAttention.forward

    def unwritten(self: MixtureOfAttention, *args: Any) -> Any:
        choose = type(self.gate).choose
        monkeypatch.setattr(
            self.gate, "choose", lambda *of: (routing := choose(self.gate, *of))._replace(ids=routing.ids.fill_(found))
        )
        return forward(self, *args)

    monkeypatch.setattr(MixtureOfAttention, "forward", unwritten)
    driver.run([Run([5, 6, 7], greedy(2))])
