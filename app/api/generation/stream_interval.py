"""`stream_interval`: the tokens of a stream in pieces of so many, for clients that would rather read less often."""

from __future__ import annotations

from app.text.output_processor import TextDelta


class Gatherer:
    """Gathers the deltas of one choice. The first passes at once, and so does the last, with all that was held."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: TextDelta | None = None
        self._has_begun = False

    def push(self, delta: TextDelta) -> TextDelta | None:
        """Take a delta; return what is to be sent now."""
        if self._held is not None:
            delta = delta.after(self._held)
        is_due = not self._has_begun or len(delta.token_ids) >= self._interval or delta.finish_reason is not None
        self._has_begun = True
        self._held = None if is_due else delta
        return delta if is_due else None
