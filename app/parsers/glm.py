"""Tool calls of GLM: the name, then <arg_key> and <arg_value> elements in turn, all in <tool_call>."""

from __future__ import annotations

from collections.abc import Collection

from app.parsers.grammar import CallGrammar
from app.parsers.scanner import MAX_NAME, Steps
from app.parsers.xml_parameters import XmlParametersParser

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45Parser(XmlParametersParser):
    """GLM-4.5 and 4.6: name, keys and values on lines of their own."""

    open, close = "<tool_call>", "</tool_call>"
    function = ("", "\n", "</tool_call>")
    parameter = (KEY, f"{KEY_END}\n{VALUE}", VALUE_END)
    markers = (open, close, KEY, KEY_END, VALUE, VALUE_END)

    def _name(self) -> Steps[str]:
        name, marker = yield from self.scan.until("\n", KEY, self.close, limit=MAX_NAME)
        if marker != "\n":
            self.scan.back(len(marker))
        return name.strip()

    def _key(self) -> Steps[tuple[str, bool]]:
        scan = self.scan
        key, _ = yield from scan.until("<", limit=MAX_NAME)
        scan.back(1)
        is_whole = bool((yield from scan.match(KEY_END))) and (yield from scan.accept(VALUE))
        return key.strip(), is_whole

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """The name, then the arguments in the order of the schema's properties."""
        before, line = f"{cls.open}{{name}}{cls.function[1]}", cls.function[1]
        return CallGrammar(before, cls.close, separator=line, trigger=cls.open, arguments=cls.lark_arguments)


class Glm47Parser(Glm45Parser):
    """GLM-4.7 and 5: the same without new lines."""

    function = ("", "", "</tool_call>")
    parameter = (KEY, f"{KEY_END}{VALUE}", VALUE_END)
    after_value = ""
