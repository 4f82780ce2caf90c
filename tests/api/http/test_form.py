"""Fields of forms as a body's model reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from app.api.http import form
from app.api.http.form import fields_of, form_description
from app.api.http.strict_models import StrictModel
from app.bounds import Items
from app.errors import InvalidRequestError


class Form(StrictModel):
    refused: ClassVar[Mapping[str, str]] = {"other": "it is of another server"}
    ignored: ClassVar[Mapping[str, str]] = {"user": "nothing depends on it"}

    word: str | None = None
    flag: bool = False
    number: float = Field(0.0, le=2)
    count: int | None = None
    kinds: Items[Literal["a", "b"]] = Field([])
    object: dict[str, Any] | None = None


def read(*items: tuple[str, Any]) -> dict[str, Any]:
    request = Request({"type": "http", "app": Starlette(), "path": "/", "headers": []})
    return fields_of(request, FormData(items), Form, "file").model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([("word", "1")], {"word": "1"}),
        ([("flag", "true")], {"flag": True}),
        ([("flag", "False")], {"flag": False}),
        ([("flag", "1")], {"flag": True}),
        ([("number", "0.5"), ("count", "3")], {"number": 0.5, "count": 3}),
        ([("number", "1")], {"number": 1.0}),
        ([("kinds[]", "a"), ("kinds[]", "b")], {"kinds": ["a", "b"]}),
        ([("kinds", "b"), ("kinds", "a")], {"kinds": ["b", "a"]}),
        ([("object[x]", "1"), ("object[y]", "2")], {"object": {"x": "1", "y": "2"}}),
        ([("user", "me"), ("file", "anything")], {}),
    ],
)
def test_values(items: list[tuple[str, str]], expected: dict[str, Any]) -> None:
    assert read(*items) == expected


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([("flag", "perhaps")], "flag"),
        ([("number", "many")], "number"),
        ([("number", "inf")], "number"),
        ([("number", "3")], "number"),
        ([("count", "1.5")], "count"),
        ([("kinds[]", "c")], "kinds"),
        ([("word", "a"), ("word", "b")], "word"),
        ([("word[x]", "a")], "word"),
        ([("other", "1")], "other"),
        ([("unknown[]", "1")], "unknown"),
        ([("word", UploadFile(None))], "word"),  # type: ignore[arg-type]
    ],
)
def test_faults_name_the_field(items: list[tuple[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as found:
        read(*items)
    assert (found.value.param or "").partition(".")[0] == param


def test_the_document_has_file_and_fields() -> None:
    schema = form_description(Form, "file")["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert schema["required"] == ["file"]
    assert schema["properties"]["file"] == {"type": "string", "format": "binary"}
    assert {"word", "flag", "kinds"} <= schema["properties"].keys()


def test_a_whole_number_of_any_length_is_read() -> None:
    """What it may be, validation says: one of 400 digits is no float."""
    assert form._read("1" * 400, frozenset({int})) == int("1" * 400)
    assert form._read("1e999", frozenset({float})) == "1e999"
