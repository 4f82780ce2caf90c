"""Routes of the pages: a closed table of static files, read once, served with a strict Content-Security-Policy.

Nothing is loaded from elsewhere, no script or style is inline, and the browser itself refuses to turn text into HTML
(Trusted Types): what a model writes can only ever become text nodes. The page of the API alone may, as Swagger UI does
it: it shows what the server says of itself, and nothing of a model's.
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

PAGES = {"/": "chat.html", "/status": "status.html", "/docs": "api.html"}
SWAGGER_PAGE = "api.html"
ASSETS = (
    *("style.css", "icon.svg", "theme.js", "key.js"),
    *("chat.js", "answer.js", "stream.js", "view.js", "markdown.js"),
    *("attachments.js", "pictures.js", "sounds.js"),
    *("vendor/markdown-it.js", "status.js", "metrics.js", "api.js"),
)
SWAGGER = ("vendor/swagger-ui.js", "vendor/swagger-ui.css")

_SOURCES = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
_TEXT_STAYS_TEXT = ("require-trusted-types-for 'script'", "trusted-types 'none'")
CONTENT_SECURITY_POLICY = "; ".join((*_SOURCES, "img-src 'self' data:", "media-src data:", *_TEXT_STAYS_TEXT))
SWAGGER_POLICY = "; ".join((*_SOURCES, "img-src 'self' data:"))  # it makes HTML, and its icons are in its style


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file in memory; browsers ask again each time and get a 304 while it has not changed."""

    content: bytes
    media_type: str
    etag: str
    policy: str

    @classmethod
    def read(cls, name: str) -> StaticFile:
        """The file `name` of this folder."""
        path = _FOLDER / name
        content = path.read_bytes()
        etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        policy = SWAGGER_POLICY if name == SWAGGER_PAGE else CONTENT_SECURITY_POLICY
        return cls(content, _MEDIA_TYPES[path.suffix], etag, policy)

    def response(self, request: Request) -> Response:
        """The file, or 304 where the client has it."""
        headers = {
            "Content-Security-Policy": self.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "ETag": self.etag,
            "Cache-Control": "no-cache",
        }
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def page_routes() -> APIRouter:
    """The pages and what they load."""
    router = APIRouter(include_in_schema=False)
    for path, name in PAGES.items():
        _add(router, path, name)
    for name in (*ASSETS, *SWAGGER):
        _add(router, f"/pages/{name}", name)
    return router


def _add(router: APIRouter, path: str, name: str) -> None:
    file = StaticFile.read(name)

    async def serve_file(request: Request) -> Response:
        return file.response(request)

    router.add_api_route(path, serve_file, methods=["GET", "HEAD"], name=name)


ENDPOINT = Endpoint(lambda api: page_routes())
