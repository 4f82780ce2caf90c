"""Tool calls of Mistral's models: [TOOL_CALLS] and a JSON list, or, in newer ones, [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection

from app.parsers.base import ToolParser
from app.parsers.grammar import CallGrammar
from app.parsers.json_text import begin_call, json_call
from app.parsers.scanner import MAX_NAME, Mismatch, Steps

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9  # the templates refuse ids of any other form
_ID = re.compile(r"\s*\w{1,64}\s*")


class MistralParser(ToolParser):
    """Mistral, Mixtral, Ministral, Magistral, Devstral."""

    markers = (OPEN, ID, ARGS)

    def parse(self) -> Steps[None]:
        """Content, then calls in either form."""
        scan = self.scan
        while (yield from scan.content(OPEN)):
            opening = OPEN + (yield from scan.space())
            if (yield from scan.match("[")):
                yield from self._list(opening + "[")
            else:
                yield from scan.attempt(self._named(), opening)

    def _list(self, opening: str) -> Steps[None]:
        scan = self.scan
        while (yield from scan.attempt(json_call(scan), opening)):
            opening = ""
            if not (yield from scan.accept(",")):
                yield from scan.accept("]")
                return

    def _named(self) -> Steps[None]:
        scan = self.scan
        name, marker = yield from scan.until(ID, ARGS, "{", limit=MAX_NAME)
        if marker == ID:
            call_id, _ = yield from scan.until(ARGS, limit=MAX_NAME)
            if not _ID.fullmatch(call_id):
                raise Mismatch
        elif marker == "{":
            scan.back(1)
        yield from begin_call(scan, name.strip())

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """The newer form for the models whose vocabulary has its marker."""
        if ARGS in special:
            return CallGrammar(f"{OPEN}{{name}}{ARGS}", "", trigger=OPEN)
        before = '{"name": "{name}", "arguments": '
        return CallGrammar(before, "}", begin=f"{OPEN} [", separator=", ", end="]", trigger=OPEN)

    @classmethod
    def new_call_id(cls) -> str:
        """Nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))
