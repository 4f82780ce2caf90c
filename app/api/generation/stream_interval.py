"""`stream_interval`: the tokens of a stream in pieces of so many, for clients that would rather read less often."""

from __future__ import annotations

from app.text.output_processor import TextDelta


class Gatherer:
    """Gathers the deltas of one choice. The first passes at once, and so does the last, with all that was held."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: list[TextDelta] = []
        self._num_tokens = 0
        self._has_begun = False

    def push(self, delta: TextDelta) -> TextDelta | None:
        """Take a delta; return what is to be sent now."""
        self._num_tokens += len(delta.token_ids)
        is_due = not self._has_begun or self._num_tokens >= self._interval or delta.finish_reason is not None
        self._has_begun = True
        if not is_due:
            self._held.append(delta)
            return None
        held, self._held, self._num_tokens = self._held, [], 0
        return delta.after(held) if held else delta
