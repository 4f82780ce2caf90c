"""Decides which web pages may send what a browser lets any page send: a form, without asking the server first."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from app.errors import InvalidRequestError


class ForeignOriginError(InvalidRequestError):
    """A page of another site has sent the request, and is not among those that may."""

    status = 403
    code = "foreign_origin"


def check_origin(request: HTTPConnection, allowed: Sequence[str]) -> None:
    """ForeignOriginError for a request of a page that is neither this server's own nor of an `allowed` origin.

    Only browsers say where a request comes from: `Sec-Fetch-Site` (W3C Fetch Metadata), older ones `Origin`.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if "*" in allowed or origin in allowed or site in ("same-origin", "none"):
        return
    if site is not None or (origin is not None and _host(origin) != request.headers.get("host")):
        raise ForeignOriginError(f"pages of {(origin or 'another site')[:256]!r} may not send this: see cors_origins")


def _host(origin: str) -> str | None:
    """Host and port of an origin; None where it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
