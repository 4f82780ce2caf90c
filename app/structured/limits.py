"""Bounds what a grammar may cost: checked before anything reads it, while it is tried, and at every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llguidance import LLParserLimits

from app.errors import InvalidRequestError
from app.structured.structured_outputs import StructuredOutputs


@dataclass(slots=True, frozen=True)
class GrammarLimits:
    """The options `grammar_*` of EngineConfig."""

    max_bytes: int = 256 << 10
    max_depth: int = 96
    timeout_s: float = 0.5
    memory_bytes: int = 256 << 20


def parser_limits() -> LLParserLimits:
    """Work that llguidance may spend on one grammar and one mask, in units of its own.

    The library's defaults let a mask take a tenth of a second, which every other request of the step would feel;
    with these the worst grammars we know fail within a few milliseconds.
    """
    return LLParserLimits(step_lexer_fuel=50_000, step_max_items=10_000, max_lexer_states=50_000)


def check_size(spec: StructuredOutputs, limits: GrammarLimits) -> None:
    """InvalidRequestError when the grammar is too long or nests too deeply; costs no more than the limits allow."""
    field = f"structured_outputs.{spec.kind}"
    left = limits.max_bytes
    values: list[tuple[Any, int]] = [(_value(spec), 0), (spec.whitespace_pattern, 0)]
    while values:
        value, depth = values.pop()
        if depth > limits.max_depth:
            raise InvalidRequestError(f"{field}: nests deeper than {limits.max_depth} levels", param=field)
        if isinstance(value, dict):
            left -= sum(len(key) + 4 for key in value)
            values += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list | tuple):
            left -= len(value)
            values += [(item, depth + 1) for item in value]
        else:
            left -= _num_bytes(value)
        if left < 0:
            raise InvalidRequestError(f"{field}: longer than {limits.max_bytes} bytes", param=field)


def _value(spec: StructuredOutputs) -> Any:
    return getattr(spec, "json_schema" if spec.kind == "json" else spec.kind)


def _num_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    return 8
