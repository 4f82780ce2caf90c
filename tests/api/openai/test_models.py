"""/v1/models."""

from __future__ import annotations

import openai
import pytest


def test_models_are_listed_with_their_aliases(sdk: openai.OpenAI) -> None:
    models = list(sdk.models.list())
    assert [model.id for model in models] == ["m", "alias"]
    assert all((model.object, model.owned_by, model.created) == ("model", "manta", 1) for model in models)
    assert sdk.models.retrieve("alias").root == "m"  # type: ignore[attr-defined]


def test_an_unknown_model_is_a_404(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="some/model"):
        sdk.models.retrieve("some/model")
