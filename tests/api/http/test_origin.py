"""Pages of other sites may not send forms, unless their origin is allowed; what is no browser always may."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from app.api.http.origin import ForeignOriginError, check_origin


def sent(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": [(b"host", b"manta:8000"), *raw]})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"origin": "http://manta:8000"},
        {"sec_fetch_site": "cross-site", "origin": "https://chat.example"},
    ],
)
def test_who_may(headers: dict[str, str]) -> None:
    check_origin(sent(**headers), ["https://chat.example"])


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://manta:8000"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://[::1"},
    ],
)
def test_who_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(ForeignOriginError):
        check_origin(sent(**headers), ["https://chat.example"])
    check_origin(sent(**headers), ["*"])
