"""`response_format`: the OpenAI dialect's word for structured outputs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from app.api.http.strict_models import StrictModel
from app.bounds import Items, JsonObject, Text
from app.errors import InvalidRequestError
from app.records.sampling_params import StructuredOutputs


class JsonSchemaFormat(StrictModel):
    """A schema with a name; it is enforced whether or not it is called strict."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Says what the answer's text looks like. A structural tag's own fields stand beside `type`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema.")
    structures: Items[JsonObject] | None = Field(None, description="With type structural_tag: begin, schema, end.")
    triggers: Items[Text] | None = Field(None, description="With structures: texts that open one of them.")
    format: JsonObject | None = Field(None, description="With type structural_tag, instead of structures.")

    @model_validator(mode="after")
    def _fields_of_type(self) -> Self:
        allowed = {"json_schema": {"json_schema"}, "structural_tag": {"structures", "triggers", "format"}}
        for name in sorted(self.model_fields_set - {"type"} - allowed.get(self.type, set())):
            raise InvalidRequestError(f"not allowed with type {self.type}", param=f"response_format.{name}")
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequestError("required with type json_schema", param="response_format.json_schema")
        if self.type == "structural_tag" and (self.format is None) == (self.structures is None):
            raise InvalidRequestError("give either format, or structures and triggers", param="response_format")
        return self

    def structured_outputs(self) -> StructuredOutputs | None:
        """Returns what it asks of the engine; None for plain text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputs(json_object=True)
        if self.json_schema is not None:
            return StructuredOutputs(json_schema=self.json_schema.json_schema)
        return StructuredOutputs(structural_tag=self.model_dump(exclude_none=True))
