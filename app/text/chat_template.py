"""A model's chat template: messages to one prompt, rendered as transformers renders it.

Jinja in an immutable sandbox, with the names the templates of the field rely on (`raise_exception`, `strftime_now`,
`tojson` without HTML escapes, `{% generation %}`). What a template refuses is an InvalidRequestError.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.errors import CheckpointError, ConfigError, InvalidRequestError
from app.text.tokenizer import Tokenizer, read_json
from app.text.watched import OverrunError, run_watched

PLACE = "place"  # in a part: the text that stands where a picture or sound goes, if the template writes texts alone

Message = dict[str, Any]
# Marks where the last message ends, so that what the template writes after it can be cut away.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
RESERVED = frozenset(
    (*("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"), "chat_template")
)


class ExcessError(InvalidRequestError):
    """A template took more time or memory than it may."""


class StuckTemplateError(Exception):
    """A template computes longer than it may where it was asked to be quick."""


@dataclass(slots=True, frozen=True)
class RenderLimits:
    """Bounds how long one rendering may take, how long it may compute, and how much it may write."""

    max_s: float = math.inf
    max_cpu_s: float = math.inf
    max_chars: int = sys.maxsize


NO_LIMITS = RenderLimits()


class ChatTemplate:
    """The templates of one model by name (`default`, `tool_use`, ...), compiled once.

    `is_confined` says that they take any time or memory, maybe while they are compiled: they are rendered in a process
    of their own only (see template_sandbox).
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], is_confined: bool = False
    ) -> None:
        self._environment = _environment()
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self.is_confined = is_confined
        self._compiled = {name: self._compile(name, source) for name, source in self._sources.items()}

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        tokenizer: Tokenizer | None = None,
        override: str | Path | None = None,
        takes_too_much: Callable[[Mapping[str, str], Mapping[str, str]], bool] | None = None,
    ) -> ChatTemplate:
        """The template of a model directory: chat_template.jinja, else chat_template.json, else tokenizer_config.json.

        `override` is a file with a template to use instead. `takes_too_much(templates, special_tokens)` says before
        anything is compiled whether to confine them. A model without a template is fine until it is asked to
        chat. ConfigError or CheckpointError names a file that cannot be read or a template that does not parse.
        """
        path = Path(directory)
        special = (tokenizer or Tokenizer.from_directory(path)).special_tokens
        if override is None:
            templates = _read_templates(path)
        else:
            templates = {"default": _read_override(override)}
        return cls(templates, special, takes_too_much is not None and takes_too_much(templates, special))

    @property
    def source(self) -> str:
        """Source of the template that a chat with tools uses; "" when the model has none."""
        return self.source_for(has_tools=True)

    def source_for(self, has_tools: bool) -> str:
        """Source of the template for a chat with tools or without; "" when the model has none."""
        tool_use = self._sources.get("tool_use") if has_tools else None
        return tool_use or self._sources.get("default", "")

    @cached_property
    def thinks_unasked(self) -> bool:
        """Says whether the model may think where nobody has said if it shall.

        Not if the template opens the reasoning when it is asked to, and otherwise says the same as when it is told not
        to.
        """
        if self.is_confined or "enable_thinking" not in self.source:
            return True
        turn, limits = [{"role": "user", "content": "Hi."}], RenderLimits(max_s=1.0)
        told: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"enable_thinking": True}]
        try:
            unsaid, off, on = (self.render(turn, chat_template_kwargs=names, limits=limits) for names in told)
        except InvalidRequestError:  # the template refuses so short a conversation
            return True
        return not unsaid == off != on

    @cached_property
    def takes_parts(self) -> bool:
        """True if the default template iterates over a message's content, so that it may be a list of parts."""
        tree = self._environment.parse(self._sources.get("default", ""))
        return any(_walks_content(loop.iter) for loop in tree.find_all(nodes.For))

    @cached_property
    def takes_none(self) -> bool:
        """True if the template that a chat with tools uses asks if a message's content is none.

        DeepSeek's do, and write calls only, or write them rightly only, where it is. An `or` beside the question says
        that empty text means the same.
        """
        tree = self._environment.parse(self.source)
        tests = [
            *(node.test for node in tree.find_all(nodes.If)),
            *(node.test for node in tree.find_all(nodes.CondExpr)),
        ]
        return any(_asks_for_none(part) for test in tests for part in _conjuncts(test))

    @cached_property
    def takes_reasoning_parts(self) -> bool:
        """True if the default template reads reasoning as parts of the content, of type "thinking" (Mistral's do)."""
        tree = self._environment.parse(self._sources.get("default", ""))
        return self.takes_parts and any(_asks_for_reasoning_part(node) for node in tree.find_all(nodes.Compare))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        limits: RenderLimits = NO_LIMITS,
    ) -> str:
        """The prompt. Content given as parts is joined by newlines where the template expects a string, what stands for
        pictures and sounds among them.

        InvalidRequestError when the template refuses the conversation, the options contradict each other, or the
        prompt exceeds its limits; StuckTemplateError where that is the time to compute. The thread is free again in
        either case.
        """
        options = dict(chat_template_kwargs or {})
        for name in sorted(RESERVED & options.keys()):
            raise InvalidRequestError(f"{name} is a field of its own", param=f"chat_template_kwargs.{name}")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        chat = [self._normalise(message) for message in messages]
        values = {**self._special_tokens, **options, "documents": list(documents) if documents else None}
        values["tools"] = list(tools) if tools else None
        template = self._select(tools)
        if continue_final_message:
            return self._render_open(template, chat, values, limits)
        return _render(template, limits, {**values, "messages": chat, "add_generation_prompt": add_generation_prompt})

    def _select(self, tools: Sequence[dict[str, Any]] | None) -> jinja2.Template:
        assert not self.is_confined
        template = self._compiled.get("tool_use") if tools else None
        template = template or self._compiled.get("default")
        if template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        return template

    def _normalise(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, list) and not self.takes_parts:
            parts = (
                part if isinstance(part, str) else str(part.get("text") or part.get(PLACE, "")) for part in content
            )
            return {**message, "content": "\n".join(parts)}
        if message.get("role") != "assistant":
            return message
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning and self.takes_reasoning_parts:
            texts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
            return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *texts]}
        if content == "" and message.get("tool_calls") and self.takes_none:
            return {**message, "content": None}
        return message

    def _render_open(
        self, template: jinja2.Template, chat: list[Message], values: dict[str, Any], limits: RenderLimits
    ) -> str:
        """Render with the last message left open, so that the model continues it."""
        chat = deepcopy(chat)
        final = _mark_end(chat[-1]) if chat else None
        if final is None:
            raise InvalidRequestError("the final message has no text to continue", param="messages")
        rendered = _render(template, limits, {**values, "messages": chat, "add_generation_prompt": False})
        mark = rendered.rfind(_END_MARK.strip())
        if mark < 0 or final.strip() not in rendered:
            raise InvalidRequestError(
                "continue_final_message: the chat template does not keep the final message", param="messages"
            )
        kept = rendered[mark : mark + len(_END_MARK)] == _END_MARK
        return rendered[:mark] if kept else rendered[:mark].rstrip()

    def _compile(self, name: str, source: str) -> jinja2.Template | None:
        try:
            self._environment.parse(source)
            return None if self.is_confined else self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template {name!r} does not parse: {error}", param="chat_template") from error


def _mark_end(message: Message) -> str | None:
    """Put the end mark behind the message's text; returns that text, None when there is none."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and "text" in part:
            text = str(part["text"])
            part["text"] = text + _END_MARK
            return text
    return None


def _render(template: jinja2.Template, limits: RenderLimits, values: Mapping[str, Any]) -> str:
    def written() -> str:
        pieces, num_chars = [], 0
        for piece in template.generate(values):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > limits.max_chars:
                raise InvalidRequestError(f"the prompt exceeds {limits.max_chars} characters", param="messages")
        return "".join(pieces)

    try:
        return run_watched(written, limits.max_s, limits.max_cpu_s)
    except OverrunError as error:
        if error.by_cpu:
            raise StuckTemplateError from None
        raise ExcessError(f"the chat template takes more than {limits.max_s:g} s", param="messages") from None
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise InvalidRequestError(f"the chat template refuses this conversation: {error}", param="messages") from error


def _read_override(path: str | Path) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template: cannot read {path}: {error}", param="chat_template") from error


def _read_templates(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    for name in ("chat_template.json", "tokenizer_config.json"):  # the first of models that also see
        configured = read_json(path / name).get("chat_template")
        if configured is not None:
            return _named(path / name, configured)
    return {}


def _named(file: Path, configured: Any) -> dict[str, str]:
    """Templates by name; a file holds one text, a list of {name, template} or an object."""
    try:
        if isinstance(configured, list):
            configured = {entry["name"]: entry["template"] for entry in configured}
        named = {"default": configured} if isinstance(configured, str) else dict(configured)
        if not all(isinstance(source, str) for source in named.values()):
            raise TypeError("a template is a text")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: chat_template is unusable: {error!r}", param="chat_template") from None
    return named


def _is_content(node: nodes.Node) -> bool:
    """True if an expression is a message's content, by the names templates give it."""
    match node:
        case nodes.Name(name=name):
            return bool(name == "content")
        case nodes.Getattr(attr=attr):
            return bool(attr == "content")
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return bool(value == "content")
    return False


def _walks_content(node: nodes.Node) -> bool:
    """True if a loop over this goes through a message's content: itself, `content or []`, `content | select(...)`."""
    match node:
        case nodes.Or(left=inner) | nodes.Filter(node=nodes.Node() as inner):
            return _walks_content(inner)
    return _is_content(node)


def _conjuncts(test: nodes.Node) -> list[nodes.Node]:
    """Returns what a condition demands: the parts that `and` joins, each without its `not`."""
    match test:
        case nodes.And(left=left, right=right):
            return _conjuncts(left) + _conjuncts(right)
        case nodes.Not(node=node):
            return _conjuncts(node) if isinstance(node, nodes.Test) else [node]
    return [test]


def _asks_for_none(node: nodes.Node) -> bool:
    """True if an expression is `message.content is none`."""
    if not isinstance(node, nodes.Test) or node.name != "none":
        return False
    return not isinstance(node.node, nodes.Name) and _is_content(node.node)


def _asks_for_reasoning_part(node: nodes.Compare) -> bool:
    """True if an expression is `part.type == "thinking"`."""
    match node:
        case nodes.Compare(
            expr=nodes.Getattr(attr="type") | nodes.Getitem(arg=nodes.Const(value="type")),
            ops=[nodes.Operand(op="eq", expr=nodes.Const(value="thinking"))],
        ):
            return True
    return False


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; its text passes through."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
