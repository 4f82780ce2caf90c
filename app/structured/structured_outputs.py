"""The constraint a request may put on its text. Field names are vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.bounds import MAX_NAME_CHARS, ItemTuple, JsonObject, Text

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(BaseModel):
    """Exactly one of the six kinds. The text of an answer that ends by itself matches it as a whole.

    `json` is the attribute `json_schema` in Python, since pydantic models have a method of that name; the constructor
    takes both.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, str_max_length=MAX_NAME_CHARS
    )

    json_schema: JsonObject | bool | None = Field(
        None, alias="json", description="JSON schema, as an object or as JSON text."
    )
    regex: Text | None = Field(None, description="Regular expression that the whole text matches.")
    choice: ItemTuple[Text] | None = Field(None, description="The text is one of these.")
    grammar: Text | None = Field(None, description="Context-free grammar in the Lark notation or as GBNF (`::=`).")
    json_object: bool | None = Field(None, description="True: any JSON object.")
    structural_tag: JsonObject | None = Field(
        None, description="Free text with constrained parts that begin at a trigger; an object or JSON text."
    )
    disable_any_whitespace: bool = Field(
        False, description="JSON without white space between its parts. Only with json and json_object."
    )
    whitespace_pattern: Text | None = Field(
        None, description="White space allowed between the parts of JSON, as a regular expression."
    )

    @field_validator("json_schema", "structural_tag", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from error

    @field_validator("choice")
    @classmethod
    def _some_choice(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or any(not text for text in value)):
            raise ValueError("must name at least one choice, none of them empty")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        kinds = self._kinds()
        if len(kinds) != 1:
            found = "none is" if not kinds else f"{', '.join(kinds)} are"
            raise ValueError(f"exactly one of {', '.join(KINDS)} must be set, but {found}")
        is_json = kinds[0] in ("json", "json_object")
        if not is_json and (self.disable_any_whitespace or self.whitespace_pattern is not None):
            raise ValueError("disable_any_whitespace and whitespace_pattern only go with json and json_object")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("disable_any_whitespace and whitespace_pattern exclude each other")
        return self

    def _kinds(self) -> list[Kind]:
        """Every kind that is set; `json_object: false` sets nothing."""
        values = {
            "json": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        return [cast("Kind", kind) for kind, value in values.items() if value is not None]

    @property
    def kind(self) -> Kind:
        """The one kind that is set."""
        return self._kinds()[0]
