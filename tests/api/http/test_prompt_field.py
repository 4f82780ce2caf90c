"""The four forms of a prompt, and that a fault is told of the form that was sent."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from app.api.http.prompt_field import PromptField

FIELD: TypeAdapter[Any] = TypeAdapter(PromptField)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_every_form(prompt: Any) -> None:
    assert FIELD.validate_python(prompt) == prompt


@pytest.mark.parametrize(
    ("prompt", "tag"), [(7, "text"), (["a", 1], "texts"), ([1, "a"], "ids"), ([[1], ["a"]], "batches")]
)
def test_a_fault_is_that_of_the_form(prompt: Any, tag: str) -> None:
    with pytest.raises(ValidationError) as error:
        FIELD.validate_python(prompt)
    assert {fault["loc"][0] for fault in error.value.errors()} == {tag}
