"""Every number of the configuration is finite, whichever option it is."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from app.config.frozen import Frozen
from app.config.serve import ServeConfig


def parts(kind: object) -> Iterator[type[BaseModel]]:
    """The models that an annotation names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in typing.get_args(kind):
        yield from parts(inner)


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A model, and those of its fields."""
    found = {model}
    for field in model.model_fields.values():
        for part in parts(field.annotation):
            found |= sections(part)
    return found


FLOATS = [
    (section, name)
    for section in sorted(sections(ServeConfig), key=lambda one: one.__name__)
    for name, field in section.model_fields.items()
    if float in (field.annotation, *typing.get_args(field.annotation))
]


def test_all_sections_are_frozen_and_many_options_are_floats() -> None:
    assert all(issubclass(section, Frozen) for section in sections(ServeConfig))
    assert len(FLOATS) > 30


@pytest.mark.parametrize(("section", "name"), FLOATS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("value", [math.inf, math.nan, "inf", ".nan"])
def test_an_infinite_option_is_refused_by_name(section: type[BaseModel], name: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        section.model_validate({name: value})
    assert (name,) in [error["loc"] for error in refused.value.errors()]
