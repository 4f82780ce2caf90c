"""Which web pages may send what a browser lets any page send: a form, without asking the server first."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi import Request

from app.errors import InvalidRequestError


class ForeignOriginError(InvalidRequestError):
    """A page of another site has sent the request, and is not among those that may."""

    status = 403
    code = "foreign_origin"


def check_origin(request: Request, allowed: Sequence[str]) -> None:
    """ForeignOriginError for a request of a page that is neither this server's own nor of an `allowed` origin.

    Only browsers say where a request comes from: `Sec-Fetch-Site` (W3C Fetch Metadata), older ones `Origin`.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if "*" in allowed or origin in allowed or site in ("same-origin", "none"):
        return
    is_own = site is None and (origin is None or urlsplit(origin).netloc == request.headers.get("host"))
    if not is_own:
        raise ForeignOriginError(f"pages of {(origin or 'another site')[:256]!r} may not send this: see cors_origins")
