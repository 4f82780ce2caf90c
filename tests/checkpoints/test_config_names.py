"""Fields of config.json laid over others, and under the names that their families gave them."""

from __future__ import annotations

from app.checkpoints.config_names import overridden, with_common_names


def test_objects_are_overridden_by_name() -> None:
    given = {"a": 1, "rope": {"type": "yarn", "factor": 2.0}, "b": [1]}
    found = overridden(given, {"rope": {"factor": 4.0}, "b": None, "c": {"d": 1}})
    assert found == {"a": 1, "rope": {"type": "yarn", "factor": 4.0}, "b": None, "c": {"d": 1}}
    assert given["rope"] == {"type": "yarn", "factor": 2.0}


def test_common_names_say_what_the_published_ones_do() -> None:
    chatglm = {"model_type": "chatglm", "num_layers": 28, "vocab_size": None, "padded_vocab_size": 65024}
    found = with_common_names(chatglm)
    assert (found["num_hidden_layers"], found["vocab_size"], found["num_layers"]) == (28, 65024, 28)
    assert with_common_names({**chatglm, "num_hidden_layers": 3})["num_hidden_layers"] == 3
    assert with_common_names({"model_type": "llama", "num_layers": 4}) == {"model_type": "llama", "num_layers": 4}
