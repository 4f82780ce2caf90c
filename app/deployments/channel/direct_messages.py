"""Names what goes over the connection between an ingress and an engine replica, and who proves what when it opens.

The ingress connects and says hello; the replica answers with its proof; the ingress sends its own proof and, right
behind it, what it wants. From then on questions have numbers, and answers those of their questions.
"""

from __future__ import annotations

import hmac
from enum import IntEnum

INGRESS, REPLICA = b"ingress", b"replica"  # as whom a side proves itself


class Kind(IntEnum):
    """Kinds of messages; the greeting's first, then those of the ingress, then those of the replica."""

    HELLO = 0
    PROOF = 1
    OPEN = 2  # an Opening: once a connection
    SUBMIT = 3  # requests (sent_requests.py): answered by their refusals
    SECLUDE = 4  # a stream id: answered by whether the replica was had
    CONTROL = 5  # a ControlMessage
    FRAME = 6  # a Frame
    ANSWER = 7
    UNREADABLE = 8  # the answer to requests that this replica cannot read
    FAILED = 9  # the answer where none came; why


def channel_secret(key: bytes) -> bytes:
    """The secret of these connections, which follows from the cluster's key and does not give it away."""
    return hmac.digest(key, b"manta: connections of channels", "sha256")
