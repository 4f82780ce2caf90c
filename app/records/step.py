"""The two messages between host and device (invariant I2): SchedulerOutput down, ModelRunnerOutput up.

A step message carries diffs, not state (I3): the device keeps, per row, the token ids, the block table, the number of
computed tokens and the sampling state, and advances them itself:

- after a step message, `num_computed_tokens[row] += num_scheduled_tokens[row]`;
- a row whose scheduled tokens reach the end of its known tokens samples one token, which the device appends to the
  row's token ids, so that the next step message can be written before the token has come back (two steps in flight);
- such a row may compute draft tokens beyond that end, which the device holds behind its known tokens. It samples after
  each of them, and gets the tokens up to the first that differs from its draft. The device takes back the others at
  once. The host counts all of them until the output says how many there were, and passes that on in `rejected_drafts`:
  so what it knows of such a row's counts is an upper bound, on both sides of the channel.

Order within a step message: `transfers`, `freed_rows`, `rejected_drafts`, `new_requests`, `new_blocks`, the step
itself. A row may be freed and given away in the same step message. Loads may go on in the background: the step that
first computes in a row waits for those of its blocks.

Plain numpy and dataclasses, so that a step message pickles small and the host half never imports torch (I8).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.records.request import EngineRequest

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


@dataclass(slots=True)
class NewRequest:
    """Everything the device needs to know of a request that enters (or re-enters, after preemption) a row."""

    row: int
    token_ids: Int32Array  # [num_tokens]: prompt, and the output so far of a resumed request
    num_prompt_tokens: int
    num_computed_tokens: int  # prefix-cache hit: their KV is in the first blocks already
    block_ids: list[int]
    spec: EngineRequest  # as admitted: its tokens are in `token_ids`, its seed and max_tokens are set
    eos_token_ids: tuple[int, ...]  # masked until min_tokens, with stop_token_ids
    has_grammar: bool = False  # step messages may carry masks for the row


@dataclass(slots=True)
class TokenMasks:
    """Says which tokens a grammar lets some of a step's rows sample: bit t % 32 of word t // 32 is token t."""

    indices: Int32Array  # [G], ascending, into the step's logits: one for each row that samples, and for each draft
    words: Int32Array  # [G, ceil(V / 32)]


class StateCopy(NamedTuple):
    """A copy of a row's states, and where it lies: in blocks, on ranks without any in a slot (StatePool)."""

    row: int
    slot: int  # -1: there are none
    blocks: list[int]


@dataclass(slots=True)
class StateCopies:
    """States that are copied before the step, from kept ones to rows first, then from rows."""

    loads: list[StateCopy]
    stores: list[StateCopy]


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `rows[i]` computes `num_scheduled_tokens[i]` more tokens, draft tokens included.

    `samples[i]` is True when those tokens reach the end of what is known, so the row samples. Decodes come first.
    An empty step message (no rows) is legal: it only carries frees, or flushes.
    """

    step_id: int
    rows: Int32Array  # [R]
    num_scheduled_tokens: Int32Array  # [R]
    samples: NDArray[np.bool_]  # [R]
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[tuple[int, list[int]]] = field(default_factory=list)  # (row, block ids appended to its table)
    freed_rows: list[int] = field(default_factory=list)
    rejected_drafts: list[tuple[int, int]] = field(default_factory=list)  # (row, drafts counted before in vain)
    num_draft_tokens: Int32Array | None = None  # [R], 0 in rows that do not sample; None: no row has any
    num_proposed: int = 0  # draft tokens that the rows which sample are to have behind their new ones
    masks: TokenMasks | None = None
    transfers: Any | None = None  # from the KV connector's host half to those in the workers, of its own type
    state_copies: StateCopies | None = None  # of layers that keep states
    flush: bool = False  # return the output of every step up to this one, waiting for the device

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return int(self.num_scheduled_tokens.sum())


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token first, then of the most likely ones, or of those that
    `logprob_token_ids` names.

    Raw: log-softmax of the model's logits before penalties and temperature. `ranks` are the tokens' ranks, 1 = most
    likely.
    """

    token_ids: list[int]  # [1 + k]
    logprobs: list[float]  # [1 + k]
    ranks: list[int]  # [1 + k]


@dataclass(slots=True)
class ProposedDrafts:
    """The draft tokens that the device now holds behind some of the rows that sampled, for the host to judge."""

    indices: Int32Array  # [G], ascending: the j-th True of the step message's `samples`
    token_ids: Int32Array  # [G, P]


@dataclass(slots=True)
class ModelRunnerOutput:
    """Holds what step `step_id` brought: the tokens of each row that samples, one row's behind the other's.

    The j-th True of the step message's `samples` got `num_sampled_tokens[j]` of the T tokens, from one to one more than
    its draft tokens. `logprobs[t]` is None where the request did not ask. `prompt_logprobs` maps an index into the step
    message's `rows` to (position of the first token described, one entry per prompt token from there on).
    """

    step_id: int
    sampled_token_ids: Int32Array  # [T]
    num_sampled_tokens: Int32Array | None = None  # [N]; None: one each
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] | None = None
    drafts: ProposedDrafts | None = None  # of rows with a grammar; None: there is none, or nobody drafts
    step_time_s: float = 0.0  # time the device took, as seen by the worker
    apart_s: float = 0.0  # of it for what is no token's: encoders
    was_over: bool = False  # before the step behind it was launched: the device waited, or the host is as slow
    loading_since: int = 0  # the oldest step whose loads were still under way; 0: all were done
    # The j-th True's result: of a pooling model's instead of tokens, else beside them, of a prompt that asked for one.
    pooled: list[Float32Array | None] | None = None
    figures: dict[str, float] = field(default_factory=dict)  # what the worker counted since the output before
    # What features found out of each token, by name, [T]; a request that asks for it gets it (see EngineRequest).
    token_figures: dict[str, Float32Array] = field(default_factory=dict)

    @property
    def tokens_s(self) -> float:
        """Time that the step's tokens took."""
        return max(0.0, self.step_time_s - self.apart_s)


@dataclass(slots=True, frozen=True)
class WorkerCall:
    """Instead of a step message, when none is out: call a method of every worker. It goes the way of the step messages,
    so that it collides with no step, and the thread that executes these executes it."""

    method: str
    arguments: tuple[Any, ...]
