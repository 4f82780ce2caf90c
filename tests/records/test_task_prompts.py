"""Prompts by name and by kind of input."""

from __future__ import annotations

import pytest

from app.errors import InvalidRequestError
from app.records.task_prompts import DOCUMENT, QUERY, TaskPrompts

PROMPTS = TaskPrompts((("Query", "q: "), ("passage", "p: "), ("STS", "s: ")), default="STS")


def test_the_first_name_that_the_model_has() -> None:
    assert [PROMPTS.first_of(names) for names in (QUERY, DOCUMENT, ("classification",))] == ["q: ", "p: ", "s: "]
    assert [PROMPTS.of(input_type=kind) for kind in ("search_query", "document", "STS", "clustering")] == [
        *("q: ", "p: ", "s: ", "s: ")
    ]
    assert [PROMPTS.of(), TaskPrompts().of(), TaskPrompts().of(input_type="query")] == ["s: ", "", ""]


def test_names_that_the_model_does_not_have() -> None:
    with pytest.raises(InvalidRequestError, match="this model has: Query, passage, STS"):
        PROMPTS.of("query")
    with pytest.raises(InvalidRequestError, match="none"):
        TaskPrompts().of(input_type="something")
