"""The rows of running requests as numpy columns, so that a steady decode step costs no Python per request.

A row is a request's permanent place on the device while it runs (I3). The columns mirror what the device will hold
once all submitted step messages are done, if it keeps every draft token: upper bounds, both of which an output lowers
by the drafts that were rejected. `num_known` and `num_confirmed` follow what has come back. A row's generation is a
number used once for each stay of a request in a row: it tells a late output for an earlier occupant from the present
one's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.kv_cache.running_rows import RunningRows
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams
from app.records.thinking_budget import ThinkingBudget
from app.structured.masks import DraftMasks
from app.telemetry.metrics import MOST_DRAFTS

IntArray = NDArray[np.intp]


class RowTable:
    """Columns [max_num_seqs], indexed by row; a free row has generation 0 and is not runnable."""

    def __init__(self, num_rows: int) -> None:
        self.requests: list[Request | None] = [None] * num_rows
        self.generation = np.zeros(num_rows, np.int64)
        self.runnable = np.zeros(num_rows, np.bool_)  # occupied and not paused
        self.num_tokens = np.zeros(num_rows, np.int32)  # known tokens and placeholders of tokens in flight
        self.num_computed = np.zeros(num_rows, np.int32)  # computed, or scheduled in steps in flight
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.limit = np.zeros(num_rows, np.int32)  # most tokens ever computed: the last token needs no computing
        self.capacity = np.zeros(num_rows, np.int32)  # slots allocated
        self.num_known = np.zeros(num_rows, np.int32)  # tokens that the host has seen
        self.num_confirmed = np.zeros(num_rows, np.int32)  # computed by step messages that have returned
        self.next_publish = np.zeros(num_rows, np.int32)  # num_confirmed at which the next block is full
        self.num_drafts = np.zeros(num_rows, np.int32)  # draft tokens that the device will hold
        self.most_drafts = np.zeros(num_rows, np.int32)  # of those proposed, that steps verify
        self.may_draft = np.zeros(num_rows, np.bool_)
        self.num_right_drafts = np.zeros(num_rows, np.int64)  # since the request entered
        self.num_wrong_drafts = np.zeros(num_rows, np.int64)
        self.draft_masks: dict[int, DraftMasks] = {}  # of rows with a grammar, whose drafts the host has seen
        self.last_step = np.zeros(num_rows, np.int64)  # the latest step message that contains the row
        self.slow_path = np.zeros(num_rows, np.bool_)  # its tokens need more than an append
        self.has_grammar = np.zeros(num_rows, np.bool_)  # computes nothing while a token of it is in flight (I2)
        self.watches_eos = np.zeros(num_rows, np.bool_)
        self.last_token_time = np.zeros(num_rows, np.float64)  # 0 before the first token
        self.num_changes = 0  # requests that came, went, were held or let go on
        self._free = list(range(num_rows - 1, -1, -1))
        self._next_generation = 1

    @property
    def num_free(self) -> int:
        """Rows without a request."""
        return len(self._free)

    @property
    def num_occupied(self) -> int:
        """Rows with a request."""
        return len(self.requests) - len(self._free)

    def occupants(self) -> list[Request]:
        """Every request in a row."""
        return [request for request in self.requests if request is not None]

    def request_at(self, row: int) -> Request:
        """The request in an occupied row."""
        request = self.requests[row]
        assert request is not None
        return request

    def in_order(self, rows: IntArray) -> list[Request]:
        """The requests in these rows, by rank."""
        return sorted((self.request_at(row) for row in rows.tolist()), key=lambda request: request.rank)

    def pending(self) -> NDArray[np.int32]:
        """Tokens that each row still has to compute towards what is known or in flight (I1); 0 if not runnable, or if
        the mask of the token after them needs one that is in flight."""
        pending = np.minimum(self.num_tokens, self.limit)
        pending -= self.num_computed
        pending *= self.runnable
        if self.has_grammar.any():
            pending *= ~self.has_grammar | (self.num_known == self.num_tokens)
        return pending

    def running(self) -> RunningRows:
        """Returns what the requests that may be in a step have."""
        rows = np.flatnonzero(self.runnable)
        return RunningRows(self.num_tokens[rows], self.capacity[rows], self.num_confirmed[rows])

    def set_runnable(self, row: int, runnable: bool) -> None:
        """Sets whether the request in the row may be in a step."""
        self.num_changes += 1
        self.runnable[row] = runnable

    def enter(self, request: Request, num_computed: int, capacity: int, next_publish: int) -> int:
        """Give `request` a free row with `num_computed` tokens already in the cache; returns the row."""
        row = self._free.pop()
        work = request.spec.work
        self.requests[row] = request
        self.generation[row] = self._next_generation
        self._next_generation += 1
        self.set_runnable(row, not request.paused)
        self.num_tokens[row] = self.num_known[row] = request.num_tokens
        self.num_computed[row] = self.num_confirmed[row] = num_computed
        self.num_prompt[row] = request.num_prompt_tokens
        self.limit[row] = request.max_total_tokens - 1
        self.capacity[row] = capacity
        self.next_publish[row] = next_publish
        self.num_drafts[row] = 0  # none before it has sampled here
        self.most_drafts[row] = MOST_DRAFTS
        self.num_right_drafts[row] = self.num_wrong_drafts[row] = 0
        self.draft_masks.pop(row, None)
        self.may_draft[row] = may_draft(request)
        self.last_step[row] = 0
        self.slow_path[row] = needs_slow_path(request)
        self.has_grammar[row] = request.matcher is not None
        self.watches_eos[row] = isinstance(work, SamplingParams) and not work.ignore_eos
        self.last_token_time[row] = request.last_token or 0.0
        request.row = row
        return row

    def leave(self, request: Request) -> int:
        """Free the request's row and return it; steps in flight may still mention it under the old generation."""
        row = request.row
        assert self.requests[row] is request
        if self.last_token_time[row] > 0:
            request.last_token = float(self.last_token_time[row])
        request.num_right_drafts += int(self.num_right_drafts[row])
        request.num_wrong_drafts += int(self.num_wrong_drafts[row])
        self.requests[row] = None
        self.generation[row] = 0
        self.set_runnable(row, False)
        self.has_grammar[row] = False
        request.row = -1
        self._free.append(row)
        return row


def may_draft(request: Request) -> bool:
    """True if a step may bring the request several tokens: a thinking budget counts on exact lengths."""
    return request.spec.asked(ThinkingBudget) is None and request.spec.pooling is None


def needs_slow_path(request: Request) -> bool:
    """True if the request's next token needs more than an append: the first one, stop tokens, what comes with each, a
    grammar."""
    first, spec = request.first_token is None, request.spec
    asks = spec.wants_logprobs or bool(request.stop_token_ids) or (bool(spec.asks) and bool(spec.token_figures))
    return first or asks or request.matcher is not None
