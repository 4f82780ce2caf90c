"""The process in which a grammar is compiled for the first time: it may be killed, the engine may not.

Reads one StructuredOutputs as a line of JSON, writes one verdict as a line of JSON: null, or [field, message]. Run as
`python -m app.structured.sandbox_process MEMORY_BYTES MODULE:FUNCTION ARGUMENT...` (a VocabularySource's
recipe).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys

import psutil
from llguidance import LLTokenizer

from app.errors import InvalidRequestError
from app.structured.grammar import compile_grammar
from app.structured.structured_outputs import StructuredOutputs
from app.structured.vocabulary import VocabularySource

ORPHAN_S = 30  # a grammar that nobody waits for any more, as the parent is gone, ends the process after so long


def main() -> None:
    """Answer lines until the input ends."""
    memory_bytes, function, *arguments = sys.argv[1:]
    module, _, name = function.partition(":")
    source: VocabularySource = getattr(importlib.import_module(module), name)(*arguments)
    vocabulary = source.load()
    limit = psutil.Process().memory_info().vms + int(memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # the engine's steps come first where cores are few
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        signal.alarm(ORPHAN_S)
        print(json.dumps(_verdict(line, vocabulary)), flush=True)
        signal.alarm(0)


def _verdict(line: str, vocabulary: LLTokenizer) -> list[str] | None:
    try:
        compile_grammar(StructuredOutputs.model_validate_json(line), vocabulary)
    except InvalidRequestError as error:
        return [error.param or "structured_outputs", error.message]
    return None


if __name__ == "__main__":
    main()
