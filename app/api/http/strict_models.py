"""The base of what bodies consist of, and the rule for fields that a model does not have.

A field that is known and would change the answer is refused by name, one that is known to change nothing is ignored and
counted by name; both stand in tables of the models. What is in no table is unknown: it is refused, but for the routes
that programs of others use, whose next version may bring it (`is_lenient`, and `limits.unknown_fields`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from app.bounds import MAX_NAME_CHARS, MAX_SENT_BACK_CHARS

_PLAIN = ("int", "float", "bool")
_COLLECTIONS = ("list", "tuple", "set", "frozenset", "dict")
NO_FIELDS: Mapping[str, str] = MappingProxyType({})
UNKNOWN = "other"  # in place of the name of a field that no table has
MAX_NAMED = 16  # unknown fields of one body that a log names


class IgnoredFields(Counter[str]):
    """Fields that one body has and nothing depends on, by name. The names are those of our tables, and UNKNOWN."""

    ignores_unknown: bool = False  # what no table has, too
    unknown: tuple[str, ...] = ()  # what the client calls some of the unknown ones

    def begin(self, unknown: Sequence[str] = ()) -> None:
        """Forget what was counted: the body is read once more, without these fields."""
        self.clear()
        self.unknown = ()
        for name in unknown:
            self.add_unknown(name)

    def add_unknown(self, name: str) -> None:
        """Count what no table has."""
        self[UNKNOWN] += 1
        if len(self.unknown) < MAX_NAMED:
            self.unknown += (name,)


def ignores_unknown(info: ValidationInfo, name: str) -> bool:
    """True if the body that is read may have `name`, which no table has: then it is counted."""
    ignored = info.context
    if not isinstance(ignored, IgnoredFields) or not ignored.ignores_unknown:
        return False
    ignored.add_unknown(name)
    return True


def _read_exactly(schema: Any) -> None:
    """Mark inside a core schema every collection as one whose first fault ends it, and every number and flag as one
    that no text and no other type stands for, as at OpenAI. Keys of objects are texts in JSON."""
    if isinstance(schema, dict):
        if schema.get("type") in _COLLECTIONS:
            schema["fail_fast"] = True
        if schema.get("type") in _PLAIN:
            schema["strict"] = True
        for key, part in schema.items():
            if key not in ("metadata", "serialization", "keys_schema"):
                _read_exactly(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _read_exactly(part)


def sort_fields(model: type[Any], data: Any, info: ValidationInfo) -> Any:
    """The fields of `data` that `model` reads: not nulls, nor what its tables `refused` and `ignored` name.

    A refused one that asks for something is a fault of its name; SDKs send false, 0 and empty lists unasked.
    """
    if not isinstance(data, dict):
        return data
    read = {}
    for name, value in data.items():
        if name in model.refused:
            if value not in (None, False, "", []):
                raise PydanticCustomError("unsupported", "{field}: {why}", {"field": name, "why": model.refused[name]})
        elif name in model.ignored:
            if value is not None and isinstance(info.context, IgnoredFields):
                info.context[name] += 1
        elif value is not None:
            read[name] = value
    return read


class FirstFault(BaseModel):
    """Stops at the first wrong entry of a list or an object: a body holds millions, each of which would be described
    at length, and one is named to the client anyway. A string is a name, unless its type says otherwise."""

    model_config = ConfigDict(str_max_length=MAX_NAME_CHARS)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _read_exactly(schema)
        return schema


class Frozen(FirstFault):
    """Immutable; null means not given."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StrictModel(Frozen):
    """Holds what a client asks for. `refused` and `ignored` are fields of other servers, each with a reason."""

    model_config = ConfigDict(extra="forbid")
    refused: ClassVar[Mapping[str, str]] = NO_FIELDS
    ignored: ClassVar[Mapping[str, str]] = NO_FIELDS
    is_lenient: ClassVar[bool] = False  # a body: its unknown fields are ignored where the server is not told otherwise

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any, info: ValidationInfo) -> Any:
        return sort_fields(cls, data, info)


class History(Frozen):
    """Holds what was said before. Clients send messages back as other servers and libraries decorated them
    (`provider_specific_fields`, `cache_control`, `tool_calls[].index`, ...): unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", str_max_length=MAX_SENT_BACK_CHARS)
