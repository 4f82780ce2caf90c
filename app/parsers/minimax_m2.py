"""Tool calls of MiniMax-M2: <invoke name="..."> elements, all of them in one <minimax:tool_call>."""

from __future__ import annotations

from collections.abc import Collection

from app.parsers.grammar import CallGrammar
from app.parsers.xml_parameters import XmlParametersParser


class MiniMaxM2Parser(XmlParametersParser):
    """MiniMax-M2 and M2.1."""

    open, close = "<minimax:tool_call>", "</minimax:tool_call>"
    function = ('<invoke name="', '">', "</invoke>")
    parameter = ('<parameter name="', '">', "</parameter>")
    markers = (open, close)

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """All calls inside one pair of tags."""
        opening, named, end = cls.function
        return CallGrammar(
            f"{opening}{{name}}{named}\n",
            f"{end}\n",
            begin=f"{cls.open}\n",
            end=cls.close,
            trigger=cls.open,
            arguments=cls.lark_arguments,
        )
