"""Routes of the pages: a closed table of static files, read once, served with a strict Content-Security-Policy.

Nothing is loaded from elsewhere, no script or style is inline, and the browser itself refuses to turn text into HTML
(Trusted Types): what a model writes can only ever become text nodes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.endpoint import Endpoint

_FOLDER = Path(__file__).resolve().parent
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

PAGES = {"/": "chat.html", "/status": "status.html"}
ASSETS = (
    *("style.css", "icon.svg", "theme.js", "key.js"),
    *("chat.js", "answer.js", "stream.js", "view.js", "markdown.js", "vendor/markdown-it.js"),
    *("status.js", "metrics.js"),
)

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file in memory; browsers ask again each time and get a 304 while it has not changed."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, name: str) -> StaticFile:
        """The file `name` of this folder."""
        path = _FOLDER / name
        content = path.read_bytes()
        return cls(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"')

    def response(self, request: Request) -> Response:
        """The file, or 304 where the client has it."""
        headers = {**SECURITY_HEADERS, "ETag": self.etag, "Cache-Control": "no-cache"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def page_routes() -> APIRouter:
    """The pages and what they load."""
    router = APIRouter(include_in_schema=False)
    for path, name in PAGES.items():
        _add(router, path, name)
    for name in ASSETS:
        _add(router, f"/pages/{name}", name)
    return router


def _add(router: APIRouter, path: str, name: str) -> None:
    file = StaticFile.read(name)

    async def serve_file(request: Request) -> Response:
        return file.response(request)

    router.add_api_route(path, serve_file, methods=["GET", "HEAD"], name=name)


ENDPOINT = Endpoint(lambda api: page_routes())
