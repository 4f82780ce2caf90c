"""Every endpoint of the HTTP application, in the order of its documents: one file and one line each."""

from __future__ import annotations

from pydantic import BaseModel

from app.api.endpoint import Endpoint
from app.registry import Registry

ENDPOINTS: Registry[Endpoint] = Registry(
    "endpoint",
    {
        "chat": "app.api.openai.chat:ENDPOINT",
        "completions": "app.api.openai.completions:ENDPOINT",
        "responses": "app.api.openai.responses:ENDPOINT",
        "chat_batch": "app.api.openai.chat_batch:ENDPOINT",
        "batches": "app.api.batches.endpoint:ENDPOINT",
        "audio": "app.api.openai.audio.endpoint:ENDPOINT",
        "realtime": "app.api.openai.audio.realtime:ENDPOINT",
        "messages": "app.api.anthropic.messages:ENDPOINT",
        "embeddings": "app.api.pooling.embeddings:ENDPOINT",
        "cohere": "app.api.pooling.cohere:ENDPOINT",
        "score": "app.api.pooling.score:ENDPOINT",
        "classify": "app.api.pooling.classify:ENDPOINT",
        "models": "app.api.openai.models:ENDPOINT",
        "tokenize": "app.api.openai.tokenize:ENDPOINT",
        "token_generation": "app.api.openai.token_generation:ENDPOINT",
        "render": "app.api.openai.render_routes:ENDPOINT",
        # Behind the routes that its pattern of an id matches, too.
        "stored_chats": "app.api.openai.stored_chats:ENDPOINT",
        "generate": "app.api.openai.generate:ENDPOINT",
        "generative_scoring": "app.api.openai.generative_scoring:ENDPOINT",
        "tokenizer_info": "app.api.server.server_info:TOKENIZER_INFO",
        "invocations": "app.api.server.invocations:ENDPOINT",
        "service": "app.api.server.service:ENDPOINT",
        "pages": "app.api.pages.routes:ENDPOINT",
    },
)


def endpoints() -> list[Endpoint]:
    """All endpoints, in the order of the table."""
    return [ENDPOINTS.load(name) for name in ENDPOINTS]


def bodies() -> tuple[type[BaseModel], ...]:
    """The bodies of all endpoints."""
    return tuple(body for endpoint in endpoints() for body in endpoint.bodies)
