"""What does not fit is refused by name, before and while weights are replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from app.config import EngineConfig
from app.engine.models.base import EngineModel
from app.engine.models.load_formats import open_checkpoint
from app.engine.models.weight_update import GivenTensor, WeightUpdate
from app.engine.worker.worker import Worker
from app.errors import CheckpointError
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model() -> Iterator[EngineModel]:
    worker = Worker(EngineConfig(model=str(tiny_model()), device="cpu", num_blocks=64, num_threads=1))
    worker.start()
    assert worker._parts is not None
    yield worker._parts.model
    worker.shutdown()


def test_a_checkpoint_is_checked_without_being_read(model: EngineModel) -> None:
    tensors = open_checkpoint(tiny_model(seed=1))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    WeightUpdate(model, CPU).check(tensors)
    with pytest.raises(CheckpointError, match=r"lacks model.norm.weight"):
        WeightUpdate(model, CPU).check({name: one for name, one in tensors.items() if name != NORM})
    with pytest.raises(CheckpointError, match=r"down_proj.weight has shape"):
        WeightUpdate(model, CPU).check(open_checkpoint(tiny_model(intermediate_size=128)))
    with pytest.raises(CheckpointError, match=r"the model has no lm_head.bias"):
        WeightUpdate(model, CPU).check({**tensors, "lm_head.bias": tensors[NORM]})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


def test_tensors_come_once_and_in_their_shapes(model: EngineModel) -> None:
    update = WeightUpdate(model, CPU)
    with torch.inference_mode():
        update.load({NORM: GivenTensor(NORM, torch.ones(64))})
        with pytest.raises(CheckpointError, match="a second time"):
            update.load({NORM: GivenTensor(NORM, torch.ones(64))})
        lm_head = "lm_head.weight"
        with pytest.raises(CheckpointError, match=r"lm_head.weight in the update has shape \[3, 64\]"):
            update.load({lm_head: GivenTensor(lm_head, torch.ones(3, 64))})
    with pytest.raises(CheckpointError, match="lacks"):
        update.finish(whole=True)
    update.finish(whole=False)
    assert not update.replaced_memory
