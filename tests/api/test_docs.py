"""docs/api.md lists every field of every request, as the application has them now."""

from __future__ import annotations

import pytest

from app.api.endpoints import bodies
from tools import api_docs


def test_the_page_is_fresh() -> None:
    fresh = api_docs.PAGE.read_text(encoding="utf-8") == api_docs.page()
    assert fresh, "docs/api.md is stale: run python -m tools.api_docs"


@pytest.mark.parametrize("body", bodies())
def test_every_field_is_described(body: type) -> None:
    """The bodies themselves are asked: a reader of the table learns what each field does."""
    bare = [name for name, field in body.model_fields.items() if not field.description]  # type: ignore[attr-defined]
    assert bare == []
