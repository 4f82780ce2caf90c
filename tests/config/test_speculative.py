"""The section of speculative decoding takes vLLM's keys, and says by name what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from app.backends import PROPOSERS
from app.config.engine import EngineConfig
from app.config.speculative import KEYS, METHODS, SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def test_it_is_off_unless_asked_for() -> None:
    assert EngineConfig().speculative_config is None


@pytest.mark.parametrize(
    ("given", "shortest", "longest"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 4}, 4, 4),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, 2, 4),
        ({"prompt_lookup_min": None, "prompt_lookup_max": 3, "model": None}, 3, 3),
    ],
)
def test_ends_of_the_lookup(given: dict[str, Any], shortest: int, longest: int) -> None:
    config = EngineConfig(speculative_config={**NGRAM, **given}).speculative_config  # type: ignore[arg-type]
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (shortest, longest)


def test_the_name_of_the_one_on_the_device_means_the_same() -> None:
    assert SpeculativeConfig.model_validate({**NGRAM, "method": "ngram_gpu"}).method == "ngram"


@pytest.mark.parametrize("name", ["deepseek_mtp", "glm4_moe_mtp"])
def test_names_of_a_familys_layers_mean_the_same(name: str) -> None:
    assert SpeculativeConfig.model_validate({"method": name, "num_speculative_tokens": 1}).method == "mtp"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_of_vllm_that_are_not_there_are_named(method: str) -> None:
    assert method not in PROPOSERS
    with pytest.raises(ValidationError, match=f"method='{method}'"):
        SpeculativeConfig.model_validate({"method": method, "num_speculative_tokens": 3})


@pytest.mark.parametrize("key", sorted(KEYS))
def test_keys_of_vllm_that_are_not_there_are_named(key: str) -> None:
    assert key not in SpeculativeConfig.model_fields
    with pytest.raises(ValidationError, match=f"{key}: a key of vLLM; "):
        SpeculativeConfig.model_validate({**NGRAM, key: 1})


@pytest.mark.parametrize(
    ("given", "place", "said"),
    [
        ({"num_speculativ_tokens": 3}, (), "did you mean num_speculative_tokens"),
        ({"method": "ngrams"}, ("method",), "did you mean ngram"),
        ({"num_speculative_tokens": 0}, ("num_speculative_tokens",), "greater than or equal to 1"),
        ({"num_speculative_tokens": 33}, ("num_speculative_tokens",), "less than or equal to 32"),
        ({"num_speculative_tokens": "many"}, ("num_speculative_tokens",), "valid integer"),
        ({"method": None}, ("method",), "Field required"),
        ({"prompt_lookup_min": 0}, ("prompt_lookup_min",), "greater than or equal to 1"),
        ({"prompt_lookup_max": 65, "prompt_lookup_min": 1}, ("prompt_lookup_max",), "less than or equal to 64"),
        ({"method": "eagle3"}, (), "model: method=eagle3 needs the drafter's checkpoint"),
        ({"model": "any"}, (), "model: method=ngram has no checkpoint of its own"),
        ({"method": "mtp", "quantization": "fp8"}, (), "quantization: method=mtp has no checkpoint of its own"),
        ({"method": "eagle", "model": "any", "quantization": "fp9"}, ("quantization",), "unknown quantization 'fp9'"),
        ({"draft_tensor_parallel_size": 0}, ("draft_tensor_parallel_size",), "greater than or equal to 1"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, (), "prompt_lookup_min: 3 is more than"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], place: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        SpeculativeConfig.model_validate({**NGRAM, **given})
    assert place in {error["loc"] for error in caught.value.errors()}


def test_a_drafter_is_whole_or_split_as_its_target() -> None:
    asked = {"method": "eagle3", "model": "any", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2}
    EngineConfig(tensor_parallel_size=2, executor="local_processes", speculative_config=asked)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="draft_tensor_parallel_size=2: 1, or tensor_parallel_size=1"):
        EngineConfig(speculative_config=asked)  # type: ignore[arg-type]


def test_the_numbers_to_choose_from() -> None:
    asked = SpeculativeConfig.model_validate({"method": "ngram", "num_speculative_tokens": None})
    assert (asked.most_drafts, asked.counts(7), asked.counts(4), asked.counts(1)) == (
        7,
        (1, 2, 3, 5, 7),
        (1, 2, 3, 4),
        (1,),
    )
    given = SpeculativeConfig.model_validate(NGRAM)
    assert (given.most_drafts, given.counts(3)) == (3, (3,))
