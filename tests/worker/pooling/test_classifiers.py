"""Classifiers of every family of decoders, and Qwen 2.5's reward models; transformers is the judge."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, Qwen2Config, Qwen2Model
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.cohere.modeling_cohere import CoherePreTrainedModel
from transformers.models.cohere2.modeling_cohere2 import Cohere2PreTrainedModel
from transformers.models.granite.modeling_granite import GranitePreTrainedModel

from app.checkpoints.model_info import ASSETS
from app.errors import UnsupportedError
from app.models import POOLING_MODELS
from app.records.pooling_params import PoolingParams
from tests.hf_logprobs import prompts
from tests.models.families.test_families import VARIANTS
from tests.tiny_models import DEFAULTS
from tests.worker.pooling.pooling_driver import PoolingDriver

# One variant of each family that transformers has a classifier of.
NAMES = ("gemma", "gemma2", "gemma3", "phi", "phi4-mini", "gpt2", "gpt_neox", "opt-350m", "falcon-new", "stablelm")
NAMES += ("bloom", "mpt", "gptj", "gpt_neo", "biogpt", "diffllama", "doge", "jetmoe")
NAMES += ("olmo2", "olmo3", "glm", "glm4", "exaone4", "smollm3", "ministral", "ministral3")
PROMPTS = prompts((3, 16, 37, 60))
TOKENIZER = str(ASSETS / "tiny-chat")


def varied(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms would otherwise be all 0 or all 1, and hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)


@pytest.mark.parametrize("name", NAMES)
def test_a_classifier_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    check_classifier(name, AutoModelForSequenceClassification.from_config, tmp_path)


def check_classifier(name: str, make: Callable[..., Any], directory: Path) -> None:
    family, changes = VARIANTS[name]
    options = {**DEFAULTS, **changes, "num_labels": 3, "pad_token_id": 0}
    for left_out in options.pop("without", ()):
        options.pop(left_out, None)
    torch.manual_seed(0)
    judge = make(AutoConfig.for_model(family, **options), attn_implementation="eager").eval()
    varied(judge)
    judge.save_pretrained(directory)
    assert json.loads((directory / "config.json").read_text())["architectures"][0] in POOLING_MODELS
    with PoolingDriver(directory, tokenizer=TOKENIZER, max_model_len=100, max_num_batched_tokens=24) as driver:
        found = driver.pool(PROMPTS, task="classify", use_activation=False)
    with torch.inference_mode():
        for prompt, logits in zip(PROMPTS, found, strict=True):
            exact = judge(torch.tensor([prompt])).logits[0].numpy()
            np.testing.assert_allclose(logits, exact, atol=1e-3)
            assert np.ptp(exact) > 1e-2


class CohereForSequenceClassification(GenericForSequenceClassification, CoherePreTrainedModel): ...  # type: ignore[misc]


class Cohere2ForSequenceClassification(GenericForSequenceClassification, Cohere2PreTrainedModel): ...  # type: ignore[misc]


class GraniteForSequenceClassification(GenericForSequenceClassification, GranitePreTrainedModel): ...  # type: ignore[misc]


# Classifiers by transformers' own recipe, of families that it has none of.
GENERIC = {
    "cohere-plus": CohereForSequenceClassification,
    "cohere2": Cohere2ForSequenceClassification,
    "granite": GraniteForSequenceClassification,
}


@pytest.mark.parametrize("name", list(GENERIC))
def test_a_classifier_of_a_family_without_one(name: str, tmp_path: Path) -> None:
    check_classifier(name, GENERIC[name]._from_config, tmp_path)


class Rewards(nn.Module):
    """Qwen2.5-Math-RM and -PRM, as the code beside their weights defines them."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.config = Qwen2Config(**{name: value for name, value in DEFAULTS.items() if name != "head_dim"})
        self.model = Qwen2Model._from_config(self.config, attn_implementation="eager")
        size = self.config.hidden_size
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, num_labels))

    def forward(self, prompt: list[int]) -> torch.Tensor:
        """Logits [T, num_labels]."""
        return self.score(self.model(torch.tensor([prompt])).last_hidden_state[0])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def rewards() -> dict[int, tuple[Path, Rewards]]:
    made = {}
    for num_labels, kind in ((1, "Qwen2ForRewardModel"), (2, "Qwen2ForProcessRewardModel")):
        torch.manual_seed(num_labels)
        directory, judge = Path(tempfile.mkdtemp()), Rewards(num_labels).eval()
        varied(judge)
        save_file(
            {name: tensor.contiguous() for name, tensor in judge.state_dict().items()}, directory / "model.safetensors"
        )
        config: dict[str, Any] = {**judge.config.to_dict(), "architectures": [kind]}
        for name in ("id2label", "label2id", "num_labels", "dtype"):
            config.pop(name, None)
        (directory / "config.json").write_text(json.dumps(config))
        made[num_labels] = directory, judge
    return made


def test_a_reward_is_a_number_of_the_text(rewards: dict[int, tuple[Path, Rewards]]) -> None:
    directory, judge = rewards[1]
    with PoolingDriver(directory, tokenizer=TOKENIZER, max_num_batched_tokens=24) as driver:
        assert driver.pooling.labels == ("LABEL_0",)
        found = driver.pool(PROMPTS, task="classify")
    with torch.inference_mode():
        for prompt, reward in zip(PROMPTS, found, strict=True):
            np.testing.assert_allclose(reward, judge(prompt)[-1].numpy(), atol=1e-3)


def test_steps_are_rewarded_token_by_token(rewards: dict[int, tuple[Path, Rewards]]) -> None:
    directory, judge = rewards[2]
    with PoolingDriver(directory, tokenizer=TOKENIZER, max_num_batched_tokens=24, block_size=8) as driver:
        assert driver.pooling.raw_task == "token_classify"
        for _ in range(2):  # the second time beside what the prefix cache holds
            found = driver.pool(PROMPTS, task="token_classify")
            with torch.inference_mode():
                for prompt, scores in zip(PROMPTS, found, strict=True):
                    np.testing.assert_allclose(scores, judge(prompt).softmax(-1).numpy(), atol=1e-3)
        with pytest.raises(UnsupportedError, match="it can: token_classify, classify"):
            driver.pooling.check(PoolingParams(task="embed"))
