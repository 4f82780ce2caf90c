"""The paths that clients ask most: what a server does for each request of theirs, it does many hundred times a second.

Their routes are matched first. They see by themselves that their client has left, so that nobody needs to watch it for
them: a path stands here only if `tests/api/http/test_busy_paths.py` shows that.
"""

from __future__ import annotations

BUSY_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"})
