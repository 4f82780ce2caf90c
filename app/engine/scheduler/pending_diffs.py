"""Diffs for the device that the next step message will carry (I2, I3)."""

from __future__ import annotations

from array import array

import numpy as np

from app.records.media import with_pixels
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.step import Int32Array, NewRequest


class PendingDiffs:
    """Collects what changed since the last step message; a change that became moot before it was sent is forgotten."""

    def __init__(self) -> None:
        self._freed_rows: list[int] = []
        self._entered: dict[int, tuple[Request, int]] = {}  # row -> (request, num_computed_tokens)
        self._new_blocks: dict[int, list[int]] = {}
        self._rejected: dict[int, int] = {}  # row -> drafts

    def enter_row(self, request: Request, num_computed_tokens: int) -> None:
        """Send a request that takes a row."""
        self._entered[request.row] = (request, num_computed_tokens)

    def add_blocks(self, row: int, blocks: list[int]) -> None:
        """Send blocks by which a row's block table grew."""
        if blocks and row not in self._entered:  # a new request is sent with all its blocks
            self._new_blocks.setdefault(row, []).extend(blocks)

    def add_blocks_each(self, rows: list[int], blocks: list[list[int]]) -> None:
        """Add these blocks to the block tables of these rows."""
        if self._new_blocks or self._entered:
            for row, new in zip(rows, blocks, strict=True):
                self.add_blocks(row, new)
        else:
            self._new_blocks = dict(zip(rows, blocks, strict=True))

    def reject_drafts(self, rows: Int32Array, num_rejected: Int32Array) -> None:
        """Send that a step computed drafts of these rows in vain."""
        some = np.flatnonzero(num_rejected)
        for row, count in zip(rows[some].tolist(), num_rejected[some].tolist(), strict=True):
            self._rejected[row] = self._rejected.get(row, 0) + count

    def leave_row(self, row: int) -> None:
        """Send that a row is free, where its request was sent."""
        self._new_blocks.pop(row, None)
        self._rejected.pop(row, None)
        if self._entered.pop(row, None) is None:
            self._freed_rows.append(row)

    def take_freed_rows(self) -> list[int]:
        """Rows freed since the last step message."""
        freed, self._freed_rows = self._freed_rows, []
        return freed

    def take_rejected_drafts(self) -> list[tuple[int, int]]:
        """(row, drafts rejected) since the last step message."""
        if not self._rejected:
            return []
        rejected, self._rejected = list(self._rejected.items()), {}
        return rejected

    def take_new_blocks(self) -> list[tuple[int, list[int]]]:
        """(row, block ids) appended to block tables since the last step message."""
        if not self._new_blocks:
            return []
        new_blocks, self._new_blocks = list(self._new_blocks.items()), {}
        return new_blocks

    def take_new_requests(self) -> list[NewRequest]:
        """Requests that entered a row since the last step message, with the blocks they hold now."""
        if not self._entered:
            return []
        entered, self._entered = self._entered, {}
        return [
            NewRequest(
                row=row,
                token_ids=np.frombuffer(array("i", request.token_ids), np.int32),  # twice as fast as np.array
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed_tokens,
                block_ids=list(request.block_ids),
                spec=_for_workers(request.spec, num_computed_tokens),
                eos_token_ids=request.eos_token_ids,
                has_grammar=request.matcher is not None,
            )
            for row, (request, num_computed_tokens) in entered.items()
        ]


def _for_workers(spec: EngineRequest, num_computed_tokens: int) -> EngineRequest:
    """The request without the pixels of what has been computed."""
    if not spec.asks:
        return spec
    return with_pixels(spec, lambda item: b"" if item.end <= num_computed_tokens else item.pixels)
