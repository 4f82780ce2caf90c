"""Encoders and classifiers through the whole engine; transformers is the judge."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from app.errors import CheckpointError, ConfigError, InvalidRequestError, PromptTooLongError, UnsupportedError
from tests.engine.core_driver import assert_idle
from tests.tiny_encoders import hf_encoder, texts, tiny_encoder
from tests.worker.pooling.pooling_driver import PoolingDriver

FAMILIES = ("bert", "roberta", "xlm-roberta")


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_every_token(family: str) -> None:
    directory = tiny_encoder(family)
    model, tokenizer = hf_encoder(directory), AutoTokenizer.from_pretrained(directory)
    asked = texts(23)
    with PoolingDriver(directory, max_num_batched_tokens=130) as driver:
        found = driver.pool(asked, task="token_embed", use_activation=False)
        assert driver.num_steps > 3, "the texts were to need several steps"
        for text, result in zip(asked, found, strict=True):
            with torch.inference_mode():
                expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            np.testing.assert_allclose(result, expected.numpy(), atol=1e-4)
        assert_idle(driver.core)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_of_texts_and_pairs(family: str, num_labels: int) -> None:
    directory = tiny_encoder(family, num_labels)
    model, tokenizer = hf_encoder(directory, classifies=True), AutoTokenizer.from_pretrained(directory)
    single, pairs = texts(9), list(zip(texts(9, 12, seed=1), texts(9, 12, seed=2), strict=True))
    with PoolingDriver(directory) as driver:
        logits = driver.pool([*single, *pairs], task="classify", use_activation=False)
        scores = driver.pool([*single, *pairs], task="classify")
    with torch.inference_mode():
        inputs = [tokenizer(text, return_tensors="pt") for text in single]
        inputs += [tokenizer(*pair, return_tensors="pt") for pair in pairs]
        expected = torch.cat([model(**one).logits for one in inputs])
    np.testing.assert_allclose(np.stack(logits), expected.numpy(), atol=1e-4)
    probabilities = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
    np.testing.assert_allclose(np.stack(scores), probabilities.numpy(), atol=1e-4)
    assert np.ptp(expected.numpy(), axis=0).min() > 0.05, "the model says the same whatever it is asked"


@pytest.mark.parametrize(("problem", "activation"), [("regression", None), ("multi_label_classification", "sigmoid")])
def test_the_kind_of_problem_chooses_the_activation(problem: str, activation: str | None) -> None:
    directory = tiny_encoder("bert", 3, changes=json.dumps({"problem_type": problem}))
    with PoolingDriver(directory) as driver:
        raw, scored = (
            driver.pool(texts(1), task="classify", use_activation=False),
            driver.pool(texts(1), task="classify"),
        )
    expected = 1 / (1 + np.exp(-raw[0])) if activation else raw[0]
    np.testing.assert_allclose(scored[0], expected, atol=1e-6)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with PoolingDriver(tiny_encoder("roberta")) as driver:
        longest = driver.pool([[5] * 128], task="embed")  # 130 positions, of which two are the padding's
        assert longest[0].shape == (48,)
        with pytest.raises(PromptTooLongError, match=r"holds 128 tokens.*129"):
            driver.pool([[5] * 129], task="embed")


def test_what_a_model_cannot_do_is_refused() -> None:
    with PoolingDriver(tiny_encoder("bert")) as driver:
        with pytest.raises(UnsupportedError, match="classify"):
            driver.pool(["a"], task="classify")
        with pytest.raises(UnsupportedError, match="Matryoshka"):
            driver.pool(["a"], dimensions=8)
    with PoolingDriver(tiny_encoder("bert", changes='{"matryoshka_dimensions": [8, 16]}')) as driver:
        with pytest.raises(InvalidRequestError, match="8, 16"):
            driver.pool(["a"], dimensions=9)
        with pytest.raises(InvalidRequestError, match="48"):
            driver.pool(["a"], dimensions=64)
        short, whole = driver.pool(["a b"], dimensions=8), driver.pool(["a b"], use_activation=False)
        np.testing.assert_allclose(short[0], whole[0][:8] / np.linalg.norm(whole[0][:8]), atol=1e-6)


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=64"):
        PoolingDriver(tiny_encoder("bert"), max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="runner=generate"):
        PoolingDriver(tiny_encoder("bert"), runner="generate")


def test_a_checkpoint_that_lacks_a_layer() -> None:
    directory = tiny_encoder("bert", seed=9)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="the number of layers is 3, but the checkpoint lacks layer 2"):
        PoolingDriver(directory)


def test_dummy_weights_run() -> None:
    with PoolingDriver(tiny_encoder("bert", 2), load_format="dummy") as driver:
        assert np.isfinite(driver.pool(["a"], task="classify")[0]).all()
