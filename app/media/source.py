"""A picture's or sound's file out of a data URL, and what kind of URL a request brings."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from app.errors import InvalidRequestError, UnsupportedError
from app.records.media import MediaKind

NOUN: Mapping[MediaKind, str] = {"image": "picture", "video": "video", "audio": "sound"}
_EXAMPLES: Mapping[MediaKind, str] = {"image": "data:image/png", "video": "data:video/mp4", "audio": "data:audio/wav"}
_MAX_TYPE_CHARS = 256


def is_fetched(url: str) -> bool:
    """True if the file lies on another server."""
    return url[:8].lower().startswith(("http://", "https://"))


def file_of(url: str, max_bytes: int, kind: MediaKind = "image") -> bytes:
    """The bytes of a data URL. UnsupportedError for another kind of URL, InvalidRequestError where it is malformed or
    holds more bytes than such a file may; the messages go on behind the name of the field."""
    if url[:5].lower() != "data:":
        scheme = url.partition(":")[0][:32] if ":" in url[:33] else ""
        raise UnsupportedError(f"is no data URL and none of http or https{f', but of {scheme!r}' if scheme else ''}")
    comma = url.find(",", 5, 5 + _MAX_TYPE_CHARS)  # a URL may have 28 MB: no part of it is copied but to be decoded
    if comma < 0:
        what = f"it has no comma before the {NOUN[kind]}, as in {_EXAMPLES[kind]};base64,..."
        raise InvalidRequestError(f"is no data URL: {what}")
    if url[5:comma].lower().rstrip().endswith(";base64"):
        return _from_base64(url, comma + 1, max_bytes, kind)
    check_bytes((len(url) - comma - 1) // 3, max_bytes, kind)
    data = unquote_to_bytes(url[comma + 1 :])
    check_bytes(len(data), max_bytes, kind)
    return data


def _from_base64(text: str, start: int, max_bytes: int, kind: MediaKind) -> bytes:
    check_bytes((len(text) - start) // 4 * 3 - 2, max_bytes, kind)
    try:
        data = binascii.a2b_base64(memoryview(text.encode("ascii"))[start:], strict_mode=True)
    except ValueError:
        raise InvalidRequestError("is not base64") from None
    check_bytes(len(data), max_bytes, kind)
    return data


def check_bytes(num_bytes: int, max_bytes: int, kind: MediaKind = "image") -> None:
    """InvalidRequestError for a file that is too large."""
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"has {num_bytes} bytes; a {NOUN[kind]} may have {max_bytes}")
