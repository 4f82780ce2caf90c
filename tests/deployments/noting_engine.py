"""An engine behind a hub of channels that notes what it is asked, and computes nothing."""

from __future__ import annotations


class NotingEngine:
    """Notes what the hub asks of it."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.paused: list[str] = []
        self.resumed: list[str] = []

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def pause(self, request_id: str) -> None:
        self.paused.append(request_id)

    def resume(self, request_id: str) -> None:
        self.resumed.append(request_id)
