"""A picture's file out of a data URL, and what kind of URL a request brings."""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

from app.errors import InvalidRequestError, UnsupportedError

_MAX_TYPE_CHARS = 256


def is_fetched(url: str) -> bool:
    """True if the picture lies on another server."""
    return url[:8].lower().startswith(("http://", "https://"))


def file_of(url: str, max_bytes: int) -> bytes:
    """The bytes of a data URL. UnsupportedError for another kind of URL, InvalidRequestError where it is malformed or
    holds too many bytes; the messages go on behind the name of the field."""
    if url[:5].lower() != "data:":
        kind = url.partition(":")[0][:32] if ":" in url[:33] else ""
        raise UnsupportedError(f"is no data URL and none of http or https{f', but of {kind!r}' if kind else ''}")
    comma = url.find(",", 5, 5 + _MAX_TYPE_CHARS)  # a URL may have 28 MB: no part of it is copied but to be decoded
    if comma < 0:
        raise InvalidRequestError("is no data URL: it has no comma before the picture, as in data:image/png;base64,...")
    if url[5:comma].lower().rstrip().endswith(";base64"):
        return _from_base64(url, comma + 1, max_bytes)
    check_bytes((len(url) - comma - 1) // 3, max_bytes)
    data = unquote_to_bytes(url[comma + 1 :])
    check_bytes(len(data), max_bytes)
    return data


def _from_base64(text: str, start: int, max_bytes: int) -> bytes:
    check_bytes((len(text) - start) // 4 * 3 - 2, max_bytes)
    try:
        data = binascii.a2b_base64(memoryview(text.encode("ascii"))[start:], strict_mode=True)
    except ValueError:
        raise InvalidRequestError("is not base64") from None
    check_bytes(len(data), max_bytes)
    return data


def check_bytes(num_bytes: int, max_bytes: int) -> None:
    """InvalidRequestError for a file that is too large."""
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"has {num_bytes} bytes; a picture may have {max_bytes}")
