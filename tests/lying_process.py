"""A process that promises an answer of more bytes than it may hold."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    for said in ((5).to_bytes(8, "little") + b"ready", (1 << 62).to_bytes(8, "little") + b"x"):
        sys.stdout.buffer.write(said)
        sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
