"""The process in which a grammar is compiled for the first time: it may be killed, the engine may not.

Asked a StructuredOutputs in JSON, it answers with a verdict in JSON: null, or [field, message]. Run as
`python -m app.structured.sandbox_process MEMORY_BYTES MODULE:FUNCTION ARGUMENT...` (a VocabularySource's
recipe).
"""

from __future__ import annotations

import importlib
import json
import sys

from llguidance import LLTokenizer

from app.errors import InvalidRequestError
from app.limited_process import serve
from app.structured.grammar import compile_grammar
from app.structured.structured_outputs import StructuredOutputs
from app.structured.vocabulary import VocabularySource


def main() -> None:
    """Answer grammars until the input ends."""
    memory_bytes, function, *arguments = sys.argv[1:]
    module, _, name = function.partition(":")
    source: VocabularySource = getattr(importlib.import_module(module), name)(*arguments)
    vocabulary = source.load()
    serve(int(memory_bytes), lambda asked: json.dumps(_verdict(asked, vocabulary)).encode())


def _verdict(asked: bytes, vocabulary: LLTokenizer) -> list[str] | None:
    try:
        compile_grammar(StructuredOutputs.model_validate_json(asked), vocabulary)
    except InvalidRequestError as error:
        return [error.param or "structured_outputs", error.message]
    return None


if __name__ == "__main__":
    main()
