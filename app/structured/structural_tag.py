"""Structural tags: free text with constrained parts, as a Lark grammar.

Two notations are read. The older one, `{"type": "structural_tag", "structures": [{"begin", "schema", "end"}],
"triggers": [...]}`, is text in which every trigger opens one of the structures that begin with it. The newer one,
`{"type": "structural_tag", "format": {...}}`, is a tree of formats; each reader below says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from app.errors import InvalidRequestError, UnsupportedError
from app.structured.json_style import json_options
from app.structured.markers import literal, quoted, split_markers
from app.structured.patterns import ascii_classes, with_ascii_patterns

FIELD = "structured_outputs.structural_tag"
# Leading part of every grammar: without it Lark text is taken for the plain dialect without JSON schemas.
HEADER = "%llguidance {}\n"
_OPEN_SLASH = re.compile(r"\\.|/", re.DOTALL)


def structural_tag_grammar(tag: dict[str, Any], markers: Mapping[str, int]) -> str:
    """The grammar of a structural tag; InvalidRequestError or UnsupportedError names the part at fault.

    `markers` are the model's special tokens: where fixed text holds the name of one, that token is meant.
    """
    if tag.get("type", "structural_tag") != "structural_tag":
        raise _wrong("type", "must be 'structural_tag'")
    writer = _Writer(markers)
    if "format" in tag:
        _closed(tag, ("type", "format"), "")
        start = writer.read(tag["format"], "format")
    else:
        _closed(tag, ("type", "structures", "triggers"), "")
        start = writer.triggered(_structures(tag), tag.get("triggers"), "")
    return HEADER + f"start: {start}\n" + "".join(f"{rule}\n" for rule in writer.rules)


def _structures(tag: dict[str, Any]) -> list[dict[str, Any]]:
    """The older notation's structures, written as the newer one's tags."""
    structures = tag.get("structures")
    if not isinstance(structures, list):
        raise _wrong("structures", "must be a list")
    tags = []
    for i, entry in enumerate(structures):
        path = f"structures.{i}"
        if not isinstance(entry, dict):
            raise _wrong(path, "must be an object")
        _closed(entry, ("begin", "schema", "end"), path)
        content = {"type": "json_schema", "json_schema": entry.get("schema", {})}
        tags.append({"type": "tag", "begin": entry.get("begin"), "content": content, "end": entry.get("end", "")})
    return tags


class _Writer:
    """Collects rules; each `read` returns what stands for the format in another rule's body."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._markers = markers
        self._has_text = False
        self._readers: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
        }

    def read(self, part: Any, path: str) -> str:
        """One format of the tree, whatever its type."""
        if not isinstance(part, dict):
            raise _wrong(path, "must be an object")
        reader = self._readers.get(str(part.get("type")))
        if reader is None:
            known = ", ".join(sorted(self._readers))
            raise UnsupportedError(f"{FIELD}.{path}.type: {part.get('type')!r} is none of {known}", param=FIELD)
        return reader(part, path)

    def triggered(self, tags: Any, triggers: Any, path: str, at_least_one: bool = False, once: bool = False) -> str:
        """Text in which a trigger opens one of the tags that begin with it."""
        tags, triggers = _some(tags, _at(path, "tags")), _some(triggers, _at(path, "triggers"))
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _wrong(_at(path, "triggers"), "must be texts that are not empty")
        names = []
        for i, tag in enumerate(tags):
            where = _at(path, f"tags.{i}")
            if not isinstance(tag, dict):
                raise _wrong(where, "must be an object")
            begin = _text(tag, "begin", where)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise _wrong(_at(where, "begin"), f"{begin!r} begins with none of the triggers")
            rest = self._tag({**tag, "begin": begin[len(trigger) :]}, where)
            names.append(self._add(f"{self._text_before(trigger)} {rest}"))
        repeat = {(False, False): "*", (True, False): "+", (False, True): "?", (True, True): ""}[at_least_one, once]
        return f"({' | '.join(names)}){repeat} " + ("" if once and at_least_one else "TEXT")

    def _triggered_tags(self, part: dict[str, Any], path: str) -> str:
        """{"triggers", "tags", "at_least_one", "stop_after_first"}"""
        _closed(part, ("type", "triggers", "tags", "at_least_one", "stop_after_first"), path)
        flags = bool(part.get("at_least_one")), bool(part.get("stop_after_first"))
        return self.triggered(part.get("tags"), part.get("triggers"), path, *flags)

    def _tag(self, part: dict[str, Any], path: str) -> str:
        """{"begin", "content", "end"}"""
        _closed(part, ("type", "begin", "content", "end"), path)
        begin, end = _text(part, "begin", path), _text(part, "end", path)
        content = part.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return f"{self._literal(begin)} {self._text_before(end)}"
        return f"{self._literal(begin)} {self.read(content, _at(path, 'content'))} {self._literal(end)}"

    def _const_string(self, part: dict[str, Any], path: str) -> str:
        """{"value"}"""
        _closed(part, ("type", "value"), path)
        return self._literal(_text(part, "value", path))

    def _json_schema(self, part: dict[str, Any], path: str) -> str:
        """{"json_schema"}"""
        _closed(part, ("type", "json_schema"), path)
        schema = part.get("json_schema")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise _wrong(_at(path, "json_schema"), "must be an object")
        return self._add("%json " + json.dumps({**with_ascii_patterns(schema), "x-guidance": json_options()}))

    def _regex(self, part: dict[str, Any], path: str) -> str:
        """{"pattern"}"""
        _closed(part, ("type", "pattern"), path)
        pattern = ascii_classes(_text(part, "pattern", path)).replace("\n", r"\n")
        return self._add(f"/{_OPEN_SLASH.sub(_escaped_slash, pattern)}/", terminal=True)

    def _any_text(self, part: dict[str, Any], path: str) -> str:
        """{}: anything"""
        _closed(part, ("type",), path)
        self._need_text()
        return "TEXT"

    def _sequence(self, part: dict[str, Any], path: str) -> str:
        """{"elements"}: one after another"""
        _closed(part, ("type", "elements"), path)
        elements = _some(part.get("elements"), _at(path, "elements"))
        return " ".join(self.read(element, _at(path, f"elements.{i}")) for i, element in enumerate(elements))

    def _or(self, part: dict[str, Any], path: str) -> str:
        """{"elements"}: one of them"""
        _closed(part, ("type", "elements"), path)
        elements = _some(part.get("elements"), _at(path, "elements"))
        parts = [self.read(element, _at(path, f"elements.{i}")) for i, element in enumerate(elements)]
        return f"({' | '.join(parts)})"

    def _literal(self, text: str) -> str:
        return literal(text, self._markers)

    def _text_before(self, end: str) -> str:
        """Any text up to the first `end`, and that. Text cannot hold a special token, so it ends by itself there."""
        self._need_text()
        head, *rest = split_markers(end, self._markers)
        if head in self._markers:
            return f"TEXT {self._literal(end)}"
        if not rest:
            return self._add(f"TEXT {quoted(head)}", lazy=True)
        text = self._add(f"/(.|\\n)*{_pattern(head)}/", terminal=True)
        return f"{text} {self._literal(''.join(rest))}"

    def _add(self, body: str, *, lazy: bool = False, terminal: bool = False) -> str:
        name = f"{'R' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _need_text(self) -> None:
        if not self._has_text:
            self._has_text = True
            self.rules.append(r"TEXT: /(.|\n)*/")


def _escaped_slash(found: re.Match[str]) -> str:
    """An escape as it is, a bare slash escaped: it would end the terminal."""
    return r"\/" if found.group() == "/" else found.group()


def _pattern(text: str) -> str:
    """A regular expression for exactly this text, as it stands between two slashes."""
    return r"\n".join(re.escape(line).replace("/", r"\/") for line in text.split("\n"))


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _wrong(path: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD}.{path}: {message}", param=FIELD)


def _text(part: dict[str, Any], name: str, path: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise _wrong(_at(path, name), "must be a text")
    return value


def _some(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(path, "must be a list with at least one entry")
    return value


def _closed(part: dict[str, Any], names: tuple[str, ...], path: str) -> None:
    unknown = sorted(set(part) - set(names))
    if unknown:
        raise _wrong(_at(path, unknown[0]), "unknown field")
