"""What does not fit is refused by name, before and while weights are replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file

from app.config.engine import EngineConfig
from app.errors import CheckpointError
from app.loading.load_formats import open_checkpoint
from app.loading.weight_update import GivenTensor, WeightUpdate
from app.models.base import EngineModel
from app.worker.worker import Worker
from tests.hf_logprobs import prompts
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.models.families.test_families import VARIANTS
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

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
        update.load({NORM: GivenTensor.of(NORM, torch.ones(64))})
        with pytest.raises(CheckpointError, match="a second time"):
            update.load({NORM: GivenTensor.of(NORM, torch.ones(64))})
        lm_head = "lm_head.weight"
        with pytest.raises(CheckpointError, match=r"lm_head.weight in the update has shape \[3, 64\]"):
            update.load({lm_head: GivenTensor.of(lm_head, torch.ones(3, 64))})
    with pytest.raises(CheckpointError, match="lacks"):
        update.finish(whole=True)
    update.finish(whole=False)
    assert not update.replaced_memory


@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "glm4_moe", "phi3"])
@pytest.mark.parametrize("source", ["directory", "memory"])
def test_families_with_other_names_and_fused_tensors_are_replaced_too(name: str, source: str) -> None:
    family, changes = {**VARIANTS, **EXPERT_VARIANTS}[name]
    before, after = (tiny_model(family, seed=seed, **changes) for seed in (0, 1))
    driver = Driver(str(before), num_blocks=16, max_model_len=64)
    driver.worker.check_weights(str(after))
    driver.worker.begin_update(True)
    if source == "directory":
        driver.worker.load_directory(str(after))
    else:  # one after another, as a transfer brings them
        for tensor in load_file(after / "model.safetensors").items():
            driver.worker.load_tensors([tensor])
    driver.worker.finish_update(True)
    judge, asked = hf_model(after), prompts((3, 16))
    found = driver.run([Run(prompt, greedy(6)) for prompt in asked])
    assert [run.tokens for run in found] == [hf_greedy(judge, prompt, 6) for prompt in asked]
