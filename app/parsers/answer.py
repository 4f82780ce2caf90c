"""From a model and a request's tools to parsed answers: which parsers, what must be visible to them, what is enforced.

Every dialect that offers tools or shows reasoning goes through here. The reasoning is told apart first; what is left of
the text is searched for calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from app.errors import UnsupportedError
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser_name, tool_parser_name
from app.parsers.base import ParsedAnswer, Parser, ReasoningParser, Schema, ToolParser, ToolSchemas
from app.parsers.custom_input import CustomInputs, InputGrammar
from app.parsers.grammar import Lark
from app.parsers.lark_expression import NoExpressionError
from app.parsers.scanner import Part
from app.records.sampling_params import StructuredOutputs
from app.structured.reasoning import ReasoningSpan
from app.text.chat_template import ChatTemplate
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer

__all__ = ["AnswerParser", "ToolOptions", "ParsedAnswer", "Part", "ParserPlan", "ToolMode", "plan_parsers"]

PROMPT_END_TOKENS = 16  # as many of the prompt's last tokens say whether reasoning is open
_of_a_model = lru_cache(maxsize=256)  # what template and tokenizer tell of a model is found once
ToolMode = Literal["none", "auto", "required"]


@dataclass(slots=True, frozen=True)
class ToolOptions:
    """The tools of a request and how they may be called.

    `mode` "required" with one tool is a named choice. `strict` names the tools whose arguments must follow their
    schema although no call is required. `is_parallel` False allows one call an answer. `custom` names the tools whose
    input is text, `inputs` holds the grammars of those that have one.
    """

    tools: ToolSchemas
    mode: ToolMode = "auto"
    strict: frozenset[str] = frozenset()
    is_parallel: bool = True
    custom: frozenset[str] = frozenset()
    inputs: Mapping[str, InputGrammar] = field(default_factory=dict)


class AnswerParser(Parser):
    """Parses the text of one choice into reasoning, content and calls. Without parsers all of it is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        max_calls: int | None,
        custom: Collection[str] = (),
    ) -> None:
        self._chain: list[Parser] = [parser for parser in (reasoning, tools) if parser is not None]
        self._inputs = CustomInputs(custom) if custom else None
        self._max_calls = max_calls
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is now certain, in order."""
        parts = [Part("content", text)] if text else []
        for parser in self._chain:
            parts = [out for part in parts for out in _through(parser, part)]
        return self._allowed(parts if self._inputs is None else self._inputs.push(parts))

    def flush(self) -> list[Part]:
        """The text has ended: return what was held."""
        parts: list[Part] = []
        for parser in self._chain:
            parts = [out for part in parts for out in _through(parser, part)] + parser.flush()
        return self._allowed(parts if self._inputs is None else self._inputs.push(parts) + self._inputs.flush())

    def _allowed(self, parts: list[Part]) -> list[Part]:
        """Count calls, and drop those beyond the most that are allowed."""
        kept = []
        for part in parts:
            self.num_calls += part.kind == "call"
            is_call = part.kind in ("call", "arguments")
            if not is_call or self._max_calls is None or self.num_calls <= self._max_calls:
                kept.append(part)
        return kept


def _through(parser: Parser, part: Part) -> list[Part]:
    return parser.push(part.text) if part.kind == "content" else [part]


@dataclass(slots=True, frozen=True)
class ParserPlan:
    """Says which parsers the answers to one request need. One plan serves all its choices."""

    reasoning: type[ReasoningParser] | None
    tools: type[ToolParser] | None
    tool_options: ToolOptions | None
    inside: bool  # whether the answers begin inside the reasoning
    shown_token_ids: frozenset[int]  # special tokens that must stay in the text for the parsers to see
    structured_outputs: StructuredOutputs | None  # what enforces the calls, where something must
    reasoning_span: ReasoningSpan | None  # before a structured output; None: that begins at once

    @property
    def is_plain(self) -> bool:
        """True if text passes unparsed."""
        return self.reasoning is None and self.tools is None

    def new_parser(self) -> AnswerParser:
        """A parser for one choice."""
        tools = (
            self.tools(self.tool_options.tools) if self.tools is not None and self.tool_options is not None else None
        )
        reasoning = self.reasoning(self.inside) if self.reasoning is not None else None
        return AnswerParser(reasoning, tools, self.max_calls, self.custom)

    @property
    def custom(self) -> frozenset[str]:
        """The tools that may be called whose input is text."""
        return self.tool_options.custom if self.tool_options is not None else frozenset()

    @property
    def max_calls(self) -> int | None:
        """Calls of one answer that are shown; None: all."""
        return 1 if self.tool_options is not None and not self.tool_options.is_parallel else None

    def new_call_id(self) -> str:
        """An id for a call, of the form that the model's template takes."""
        return (self.tools or ToolParser).new_call_id()


@dataclass(slots=True, frozen=True)
class ModelParsers:
    """Holds what reads the answers of a model: found once for it, with tools and without."""

    reasoning: type[ReasoningParser] | None
    tools: type[ToolParser] | None
    marker_ids: Mapping[str, int]  # of the markers that are tokens of their own
    shown_token_ids: frozenset[int]  # special tokens among them


def plan_parsers(
    model: ServedModel,
    prompt_token_ids: list[int],
    tool_options: ToolOptions | None = None,
    *,
    continued: str | None = None,
    answer: StructuredOutputs | None = None,
    thinks: bool | None = None,
    tools_param: str = "tools",
) -> ParserPlan:
    """The plan for a request; `continued` is the text of the assistant's message that the answer continues.

    `answer` is what the answer must match, if anything must: where it is JSON, calls are allowed instead of it.
    `thinks` says whether the client asks the model to think, or not to; where it does neither, the template decides.
    UnsupportedError names `tools_param` when the way the model calls tools is not known, or cannot be enforced.
    """
    wanted = tool_options if tool_options is not None and tool_options.tools and tool_options.mode != "none" else None
    of_tools = load_tool_parser(model, tools_param) if wanted is not None else None
    found = _parsers_of(model.tokenizer, of_tools, load_reasoning_parser(model))
    inside, span = False, None
    if (reasoning := found.reasoning) is not None:
        end = model.tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        inside = reasoning.starts_inside(end, continued)
        may_open = model.chat_template.thinks_unasked if thinks is None else thinks
        opening = reasoning.may_open(end, continued) if may_open else ""
        span = _reasoning_span(model.tokenizer, reasoning, inside, opening)
    enforced = None
    if found.tools is not None and wanted is not None:
        may_reason = inside or (span is not None and span.start_token_id is not None)
        enforced = _enforced(found.tools, wanted, answer, found.marker_ids, may_reason, tools_param)
    return ParserPlan(reasoning, found.tools, wanted, inside, found.shown_token_ids, enforced, span)


@_of_a_model
def _reasoning_span(
    tokenizer: Tokenizer, reasoning: type[ReasoningParser], inside: bool, opening: str
) -> ReasoningSpan | None:
    """The reasoning before a structured output, if there may be any: the prompt opened it, or the model may."""
    start = tokenizer.token_to_id(opening)
    end = reasoning.reasoning_end(inside or start is not None)
    return ReasoningSpan(tuple(tokenizer.encode(end, add_special_tokens=False)), start) if end else None


def load_tool_parser(model: ServedModel, param: str = "tools") -> type[ToolParser]:
    """The model's tool parser; UnsupportedError when there is none."""
    name = _tool_parser_of(model.chat_template) if model.tool_parser == "auto" else model.tool_parser
    if name is None or name == "none":
        given = model.tool_parser == "none"
        raise UnsupportedError(
            f"{param}: the way this model calls tools is not known to the server: "
            + ("it was started with tool_parser=none" if given else "its chat template is of no known format")
            + f"; start it with --tool-parser and one of {', '.join(sorted(TOOL_PARSERS))}",
            param=param,
        )
    parser: type[ToolParser] = TOOL_PARSERS.load(name)
    return parser


def load_reasoning_parser(model: ServedModel) -> type[ReasoningParser] | None:
    """The parser for the model's reasoning, if it has any."""
    return _reasoning_parser(model.chat_template, model.reasoning_parser)


@_of_a_model
def _reasoning_parser(template: ChatTemplate, option: str) -> type[ReasoningParser] | None:
    name = reasoning_parser_name(template.source) if option == "auto" else option
    return None if name is None or name == "none" else REASONING_PARSERS.load(name)


@_of_a_model
def _tool_parser_of(template: ChatTemplate) -> str | None:
    return tool_parser_name(template.source)


@_of_a_model
def _parsers_of(
    tokenizer: Tokenizer, tools: type[ToolParser] | None, reasoning: type[ReasoningParser] | None
) -> ModelParsers:
    if tools is not None and reasoning is not None and reasoning.markers == tools.markers:
        reasoning = None  # one parser finds both
    markers = [marker for parser in (tools, reasoning) if parser is not None for marker in parser.markers]
    ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
    known = {marker: index for marker, index in ids.items() if index is not None}
    return ModelParsers(reasoning, tools, known, tokenizer.special_token_ids.intersection(known.values()))


def _enforced(
    parser: type[ToolParser],
    tool_options: ToolOptions,
    answer: StructuredOutputs | None,
    marker_ids: Mapping[str, int],
    may_reason: bool,
    param: str,
) -> StructuredOutputs | None:
    """The grammar that a required call, strict arguments, or a choice between calls and JSON ask for."""
    _check_inputs(parser, tool_options, param)
    texts = {name: grammar.lark() for name, grammar in tool_options.inputs.items()}
    grammar, lark = parser.call_grammar(marker_ids), Lark(marker_ids, texts)
    kept = tool_options.strict | tool_options.custom
    loose = {name: schema if name in kept else _ANY_OBJECT for name, schema in tool_options.tools.items()}
    if tool_options.mode == "required":
        start = grammar.required(lark, tool_options.tools, tool_options.is_parallel)
    elif answer is not None:
        if answer.kind not in ("json", "json_object"):
            return None
        schema = _ANY_OBJECT if answer.json_schema is None else answer.json_schema
        start = f"({grammar.required(lark, loose, tool_options.is_parallel)} | {lark.json(schema)})"
    elif not tool_options.strict:
        return None
    elif grammar.trigger is None:
        raise UnsupportedError("this model's strict tools need a tool_choice of required or a named one", param=param)
    else:
        return StructuredOutputs(grammar=lark.finish(grammar.allowed(lark, loose, tool_options.is_parallel)))
    if may_reason:  # after reasoning the models write an empty line
        start = f"({lark.literal(chr(10))}){{0,2}} {start}"
    return StructuredOutputs(grammar=lark.finish(start))


def _check_inputs(parser: type[ToolParser], tool_options: ToolOptions, param: str) -> None:
    """UnsupportedError for a Lark grammar where the model writes the input as JSON, unless a regular expression says
    the same: no grammar of ours can be made of the client's that matches the same texts escaped."""
    if parser.writes_text:
        return
    for name, grammar in tool_options.inputs.items():
        try:
            grammar.expression()
        except NoExpressionError as error:
            raise UnsupportedError(
                f"{param}: the Lark grammar of {name!r} cannot be enforced, as this model writes the arguments of "
                f"calls as JSON and no regular expression can be made of it: {error}; give one (syntax regex), or "
                "format text",
                param=param,
            ) from None


_ANY_OBJECT: Schema = {"type": "object"}


def schema_of(parameters: Schema | None) -> Schema:
    """The schema of a tool's arguments; a tool that declares none takes an object without properties."""
    return parameters or {"type": "object", "properties": {}}
