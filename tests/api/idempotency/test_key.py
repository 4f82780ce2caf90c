"""Fingerprints of requests that are sent again: forms come apart by another boundary each time."""

from __future__ import annotations

from typing import Any

from app.api.idempotency.key import fingerprint_of


def scope(kind: str, path: str = "/a") -> dict[str, Any]:
    return {"path": path, "query_string": b"", "headers": [(b"content-type", kind.encode())]}


def form(boundary: str, value: str = "x") -> bytes:
    return f'--{boundary}\r\ncontent-disposition: form-data; name="a"\r\n\r\n{value}\r\n--{boundary}--\r\n'.encode()


def multipart(boundary: str, value: str = "x", quote: str = "") -> str:
    return fingerprint_of(scope(f"multipart/form-data; boundary={quote}{boundary}{quote}"), form(boundary, value))


def test_a_form_is_the_same_whatever_sets_its_parts_apart() -> None:
    assert multipart("abc") == multipart("d" * 40) == multipart("e f", quote='"')
    assert multipart("abc") != multipart("abc", "y")


def test_other_bodies_are_compared_as_they_are() -> None:
    kind = "application/json; boundary=abc"
    assert fingerprint_of(scope(kind), form("abc")) != fingerprint_of(scope(kind), form("d"))
    assert fingerprint_of(scope(kind), b"{}") != fingerprint_of(scope(kind, "/b"), b"{}")
    assert fingerprint_of(scope(kind), b"{}") == fingerprint_of(scope("text/plain"), b"{}")
