"""Every route that reads a JSON body, and for each the bodies whose prompt is a given text.

A test that sends something to all routes takes them from here; `assert_complete` fails once a route is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Body = dict[str, Any]


def _chat(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


def _parts(text: str) -> list[Body]:
    """A conversation of many texts that have as many characters together."""
    piece = len(text) // 100 + 1
    return [
        {"role": "user", "content": [{"type": "text", "text": text[i : i + piece]}]} for i in range(0, len(text), piece)
    ]


def _lines(text: str) -> list[str]:
    """The text in ten pieces."""
    piece = len(text) // 10 + 1
    return [text[i : i + piece] for i in range(0, len(text), piece)]


_INPUTS: list[Callable[[str], Body]] = [
    lambda text: {"input": text},
    lambda text: {"input": _lines(text)},
    lambda text: {"messages": _chat(text)},
]
_PAIRS: list[Callable[[str], Body]] = [
    lambda text: {"text_1": text, "text_2": "b"},
    lambda text: {"queries": "a", "documents": _lines(text)},
]
_DOCUMENTS: list[Callable[[str], Body]] = [
    lambda text: {"query": text, "documents": ["b"]},
    lambda text: {"query": "a", "documents": _lines(text)},
    lambda text: {"query": "a", "documents": [{"text": text}]},
]
_COHERE: Body = {"input_type": "search_query", "truncate": "NONE"}
_MESSAGES: list[Callable[[str], Body]] = [
    lambda text: {"model": "m", "max_tokens": 2, "messages": _chat(text)},
    lambda text: {"model": "m", "max_tokens": 2, "messages": _parts(text)},
    lambda text: {"model": "m", "max_tokens": 2, "messages": _chat("hi"), "system": text},
]
TEXT_BODIES: dict[str, list[Callable[[str], Body]]] = {
    "/v1/chat/completions": [
        lambda text: {"messages": _chat(text)},
        lambda text: {"messages": _parts(text), "stream": True},
    ],
    "/v1/chat/completions/render": [lambda text: {"messages": _chat(text)}, lambda text: {"messages": _parts(text)}],
    "/v1/chat/completions/batch": [lambda text: {"messages": [_chat(text)]}],
    "/v1/completions": [
        lambda text: {"prompt": text},
        lambda text: {"prompt": _lines(text), "stream": True},
    ],
    "/v1/completions/render": [lambda text: {"prompt": text}, lambda text: {"prompt": _lines(text)}],
    "/generate": [lambda text: {"prompt": text}],
    "/generative_scoring": [
        lambda text: {"query": text, "items": ["b"], "label_token_ids": [1]},
        lambda text: {"query": "a", "items": _lines(text), "label_token_ids": [1]},
    ],
    "/v1/responses": [
        lambda text: {"input": text},
        lambda text: {"input": _chat(text), "truncation": "auto"},
        lambda text: {"input": "hi", "instructions": text},
    ],
    "/v1/responses/compact": [lambda text: {"input": text}, lambda text: {"input": "hi", "instructions": text}],
    "/v1/responses/input_tokens": [lambda text: {"input": text}, lambda text: {"input": "hi", "instructions": text}],
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": [
        lambda text: {"model": "m", "messages": _chat(text)},
        lambda text: {"model": "m", "messages": _chat("hi"), "system": text},
    ],
    "/tokenize": [lambda text: {"prompt": text}, lambda text: {"messages": _chat(text)}],
    "/v1/embeddings": _INPUTS,
    "/classify": _INPUTS,
    "/pooling": _INPUTS,
    "/v2/embed": [
        lambda text: {**_COHERE, "texts": _lines(text)},
        lambda text: {**_COHERE, "inputs": [{"content": [{"type": "text", "text": text}]}]},
    ],
    "/v1/embed": [lambda text: {**_COHERE, "texts": _lines(text)}],
    "/score": _PAIRS,
    "/v1/score": _PAIRS,
    "/rerank": _DOCUMENTS,
    "/v1/rerank": _DOCUMENTS,
    "/v2/rerank": _DOCUMENTS,
}
# Texts of a message batch are bounded when its requests run, on the route of messages.
WITHOUT_TEXT = {"/detokenize", "/inference/v1/generate", "/v1/batches", "/v1/messages/batches"}
WITHOUT_TEXT |= {"/v1/chat/completions/{completion_id}", "/v1/uploads", "/v1/uploads/{upload_id}/complete"}
POOLED = {
    "/v1/embeddings": "embed",
    "/pooling": "embed",
    "/v2/embed": "embed",
    "/v1/embed": "embed",
    "/classify": "classify",
}
POOLED |= dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), "embed")


def json_routes(app: Any) -> set[str]:
    """The POST routes of `app` that read JSON."""
    return {
        path
        for path, operations in app.openapi()["paths"].items()
        if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }


def assert_complete(app: Any) -> None:
    """Every JSON route of `app` is here."""
    assert json_routes(app) == TEXT_BODIES.keys() | WITHOUT_TEXT


def bodies(path: str, text: str) -> list[Body]:
    """The bodies of a route that bring `text`, for a server of the models `m`, `embed` and `classify`."""
    model = {"model": POOLED[path]} if path in POOLED else {}
    return [make(text) | model for make in TEXT_BODIES[path]]
