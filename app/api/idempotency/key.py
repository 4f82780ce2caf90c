"""The header `Idempotency-Key`, and what makes two requests the same."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from python_multipart.multipart import parse_options_header
from starlette.types import Scope

from app.errors import InvalidRequestError
from app.records.sampling_params import MAX_SEED

HEADER = "Idempotency-Key"
RAW_HEADER = HEADER.lower().encode()
MAX_KEY_CHARS = 255
_KEY = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


class KeyReusedError(InvalidRequestError):
    """The key came before with another request (draft-ietf-httpapi-idempotency-key-header: 422)."""

    status = 422
    code = "idempotency_key_reused"


@dataclass(slots=True, frozen=True)
class IdempotentRequest:
    """One request under its key. Keys of different tenants have nothing to do with each other."""

    tenant: str
    key: str
    fingerprint: str  # of path, query and body: the same for a request that is sent again

    @property
    def seed(self) -> int:
        """Returns a seed for where the client gives none: run anew, the request brings the same tokens (I6)."""
        digest = hashlib.blake2b(f"{self.tenant}\0{self.key}\0{self.fingerprint}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") & MAX_SEED

    def check(self, fingerprint: str) -> None:
        """KeyReusedError where the key stands for a request with another fingerprint."""
        if fingerprint != self.fingerprint:
            raise KeyReusedError("the key was sent before with another path or body; take a new one", param=HEADER)


class KeyInUseError(InvalidRequestError):
    """The first request of the key runs still, and its answer is too long to be followed (the same draft: 409)."""

    status = 409
    code = "idempotency_key_in_use"

    def __init__(self) -> None:
        super().__init__(
            "the first request of the key runs still, and its answer is too long to be kept: wait for its end, or take "
            "a new key",
            param=HEADER,
        )


def key_of(scope: Scope) -> str:
    """The key of a request that has one. InvalidRequestError for one that is too long or no plain text."""
    found: list[bytes] = [value for name, value in scope["headers"] if name == RAW_HEADER]
    if len(found) != 1 or len(found[0]) > MAX_KEY_CHARS or not _KEY.fullmatch(found[0]):
        raise InvalidRequestError(f"must be one text of 1 to {MAX_KEY_CHARS} printable ASCII characters", param=HEADER)
    return found[0].decode()


def fingerprint_of(scope: Scope, body: bytes) -> str:
    """Digests what a repeated request has in common with the first one. A form's parts may come apart by another
    boundary then: clients make one up each time."""
    digest = hashlib.blake2b(digest_size=16)
    boundary = _boundary(scope)
    parts = body.replace(boundary, b"") if boundary else body
    for part in (scope["path"].encode(), scope["query_string"], parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _boundary(scope: Scope) -> bytes:
    """Returns what a form's parts are set apart by; b"" for another body."""
    kinds = (value for name, value in scope["headers"] if name == b"content-type")
    kind, options = parse_options_header(next(kinds, b""))
    return options.get(b"boundary", b"") if kind == b"multipart/form-data" else b""
