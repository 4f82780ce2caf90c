"""Lets the two ends of a connection show each other that they know one secret, which never travels over it.

Either end answers the other's fresh nonce with an HMAC (challenge and response both ways, RFC 2104), so that what a
listener on the network hears is of no use to it. The end that connects says hello, which begins with its nonce; the
other one answers with a nonce of its own and its proof; then the first one proves itself, too.
"""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = 32
GREETING_BYTES = 64  # longest message of a greeting: nothing longer is taken of a peer that has proved nothing


def new_nonce() -> bytes:
    """Returns what has never been said before."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Returns what only one who knows the secret can say, as `who`, to this hello and the nonce that answered it."""
    return hmac.digest(secret, who + nonce + hello, "sha256")


def proves(shown: bytes, secret: bytes, who: bytes, hello: bytes, nonce: bytes) -> bool:
    """True if that is the proof, compared in constant time."""
    return hmac.compare_digest(shown, proof(secret, who, hello, nonce))
