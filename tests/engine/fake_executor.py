"""A device for tests of the host half: rows, block tables and a KV cache, but arithmetic instead of a model.

Each KV slot holds a number chained from the slot before it (read through the block table) and the token written; the
next token is a function of the last slot. So a token comes out right only if every block holds what it should, and
`expected_tokens` computes the same without any cache. Misuse (a row used twice, a block written by two requests, a
block handed out while a step message that may write it is out) fails at once.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.engine.executor.base import Executor
from app.records.sampling_params import SamplingParams
from app.records.step import ModelRunnerOutput, NewRequest, ProposedDrafts, SchedulerOutput, TokenLogprobs
from app.records.worker_info import WorkerInfo

VOCAB = 997
MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    return (previous * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK


def sample(state: int, position: int, seed: int) -> int:
    return (chain(state, position * 31 + seed) >> 17) % VOCAB


def sampling_key(seed: int, choice_index: int) -> int:
    """What tells the tokens of a request's choices apart, as `seed` of the functions around it."""
    return seed + choice_index * 7919


def expected_tokens(prompt: list[int], seed: int, count: int) -> list[int]:
    """The first `count` output tokens, without cache, rows or step messages."""
    state = 0
    for token in prompt:
        state = chain(state, token)
    output: list[int] = []
    for _ in range(count):
        output.append(sample(state, len(prompt) + len(output), seed))
        state = chain(state, output[-1])
    return output


def logprobs_of(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-float(position)], [1])


@dataclass
class DeviceRow:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    blocks: list[int]
    params: SamplingParams
    occupant: int
    choice_index: int = 0
    has_grammar: bool = False
    drafts: list[int] = field(default_factory=list)  # proposed after the last token
    rejected: dict[int, int] = field(default_factory=dict)  # step -> drafts, until its output is collected


class FakeExecutor(Executor):
    """`late`: like a GPU worker, call N returns the output of step N - 1, and a flush returns everything.

    With `num_draft_tokens` it proposes drafts that are right as often as `draft_quality` says, each by itself.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        late: bool = False,
        max_num_batched_tokens: int = 1 << 30,
        num_draft_tokens: int = 0,
        draft_quality: float = 0.5,
    ) -> None:
        self.info = WorkerInfo(num_blocks, "fake", "int", num_draft_tokens=num_draft_tokens)
        self.drafter = random.Random(num_draft_tokens)
        self.draft_quality = draft_quality
        self.num_drafts = self.num_accepted = 0
        self.host_counts: dict[int, int] = {}  # row -> computed tokens as the step messages say
        self.block_size = block_size
        self.late = late
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = np.full((num_blocks, block_size), -1, np.int64)
        self.rows: dict[int, DeviceRow] = {}
        self.calls: deque[list[ModelRunnerOutput]] = deque()
        self.behind: list[ModelRunnerOutput] = []
        self.unreturned: dict[int, dict[int, int]] = {}  # step -> block -> occupant that writes it
        self.step_messages: list[SchedulerOutput] = []
        self.num_occupants = 0
        self.max_calls = 0
        self.parked = 0
        self.death: Exception | None = None

    def start(self) -> WorkerInfo:
        return self.info

    def submit(self, step_message: SchedulerOutput) -> None:
        if self.death is not None:
            raise self.death
        self.step_messages.append(step_message)
        output = self.execute(step_message)
        if not self.late:
            self.calls.append([output])
        else:
            self.behind.append(output)
            keep = 0 if step_message.flush else 1
            self.calls.append(self.behind[: len(self.behind) - keep])
            self.behind = self.behind[len(self.behind) - keep :]
        self.max_calls = max(self.max_calls, len(self.calls))

    def collect(self) -> list[ModelRunnerOutput]:
        if self.death is not None:
            raise self.death
        outputs = self.calls.popleft()
        for output in outputs:
            self.unreturned.pop(output.step_id, None)
            for device in self.rows.values():
                device.rejected.pop(output.step_id, None)
        return outputs

    def call(self, method: str, *arguments: Any) -> list[Any]:
        assert not self.calls
        assert not self.behind
        return [(method, *arguments)]

    def park(self) -> None:
        self.parked += 1

    def check_health(self) -> None:
        if self.death is not None:
            raise self.death

    def shutdown(self) -> None:
        self.rows.clear()

    # ---- the device

    def execute(self, step_message: SchedulerOutput) -> ModelRunnerOutput:
        for row in step_message.freed_rows:
            del self.rows[row]
        for row, count in step_message.rejected_drafts:
            self.host_counts[row] -= count
        for new in step_message.new_requests:
            self.enter(new)
        for row, blocks in step_message.new_blocks:
            self.rows[row].blocks += blocks
        rows = step_message.rows.tolist()
        assert len(set(rows)) == len(rows), "a row twice in one step message"
        assert step_message.num_tokens <= self.max_num_batched_tokens
        counts = step_message.num_scheduled_tokens.tolist()
        drafts = [0] * len(rows) if step_message.num_draft_tokens is None else step_message.num_draft_tokens.tolist()
        tokens: list[int] = []
        num_sampled: list[int] = []
        reported: dict[int, list[int]] = {}  # drafts of rows with a grammar
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = {}
        writers: dict[int, int] = {}
        for index, (row, count, samples) in enumerate(zip(rows, counts, step_message.samples.tolist(), strict=True)):
            device, k = self.rows[row], drafts[index]
            start = device.num_computed
            assert self.host_counts[row] == start + sum(device.rejected.values()), "the host's count is another"
            self.host_counts[row] += count
            assert k <= len(device.drafts), "drafts that nobody proposed"
            self.compute(device, count, writers)
            assert samples == (device.num_computed == len(device.token_ids) + k), "samples tells the wrong story"
            if device.params.prompt_logprobs is not None and start < device.num_prompt_tokens:
                # Position p is described by the step that computes p - 1.
                end = min(device.num_computed + 1, device.num_prompt_tokens)
                entries = [logprobs_of(device.token_ids[p], p) for p in range(start + 1, end)]
                if entries:
                    prompt_logprobs[index] = (start + 1, entries)
            if samples:
                new_tokens = self.verify(device, k, step_message)
                wanted = device.params.logprobs is not None
                first = len(device.token_ids) - len(new_tokens)
                logprobs += [logprobs_of(t, first + i) if wanted else None for i, t in enumerate(new_tokens)]
                tokens += new_tokens
                if device.has_grammar and device.drafts:
                    reported[len(num_sampled)] = device.drafts
                num_sampled.append(len(new_tokens))
        self.unreturned[step_message.step_id] = writers
        return ModelRunnerOutput(
            step_message.step_id,
            np.array(tokens, np.int32),
            None if step_message.num_draft_tokens is None else np.array(num_sampled, np.int32),
            logprobs if any(logprobs) else None,
            prompt_logprobs or None,
            ProposedDrafts(np.array(list(reported), np.int32), np.array(list(reported.values()), np.int32))
            if reported
            else None,
            step_time_s=self.time_of(step_message),
        )

    def time_of(self, step: SchedulerOutput) -> float:
        """Seconds that a step is said to have taken: none, or any where their number decides about drafts."""
        return self.drafter.random() if self.info.num_draft_tokens else 0.0

    def verify(self, device: DeviceRow, k: int, step: SchedulerOutput) -> list[int]:
        """Tokens up to the first that differs from its draft; then new drafts."""
        drafts, new_tokens = device.drafts[:k], []
        for index in range(k + 1):
            new_tokens.append(self.sample(device, k - index))
            device.token_ids.append(new_tokens[-1])
            if index < k and new_tokens[-1] != drafts[index]:
                break
        rejected = k + 1 - len(new_tokens)
        device.num_computed -= rejected
        if rejected:
            device.rejected[step.step_id] = rejected
        self.num_drafts, self.num_accepted = self.num_drafts + k, self.num_accepted + k - rejected
        device.drafts = self.propose(device, step.num_proposed)
        return new_tokens

    def propose(self, device: DeviceRow, count: int) -> list[int]:
        """What will come next, or at times something else."""
        state, drafts = self.state_at(device, device.num_computed - 1), []
        for position in range(len(device.token_ids), len(device.token_ids) + count):
            state = chain(state, drafts[-1] if drafts else device.token_ids[-1])
            seed = sampling_key(device.params.seed or 0, device.choice_index)
            right = self.drafter.random() < self.draft_quality
            drafts.append(sample(state, position, seed) if right else self.drafter.randrange(VOCAB))
        return drafts

    def enter(self, new: NewRequest) -> None:
        assert new.row not in self.rows, "a row given away before it was freed"
        assert 0 <= new.num_computed_tokens < len(new.token_ids)
        assert new.spec.sampling.seed is not None
        self.num_occupants += 1
        self.host_counts[new.row] = new.num_computed_tokens
        self.rows[new.row] = DeviceRow(
            new.token_ids.tolist(),
            new.num_prompt_tokens,
            new.num_computed_tokens,
            list(new.block_ids),
            new.spec.sampling,
            self.num_occupants,
            new.spec.choice_index,
            new.has_grammar,
        )

    def compute(self, device: DeviceRow, count: int, writers: dict[int, int]) -> None:
        assert count >= 1
        token_ids = device.token_ids + device.drafts
        assert device.num_computed + count <= len(token_ids), "computes a token that does not exist"
        for position in range(device.num_computed, device.num_computed + count):
            block = device.blocks[position // self.block_size]
            assert writers.setdefault(block, device.occupant) == device.occupant, "two requests write one block"
            for out in self.unreturned.values():
                assert out.get(block, device.occupant) == device.occupant, "block handed out while a step is out"
            previous = 0
            if position:
                before = position - 1
                previous = int(self.kv[device.blocks[before // self.block_size], before % self.block_size])
                assert previous >= 0, "reads a slot that nobody wrote"
            self.kv[block, position % self.block_size] = chain(previous, token_ids[position])
        device.num_computed += count

    def sample(self, device: DeviceRow, before_last: int = 0) -> int:
        """After the last computed token, or so many before it."""
        state = self.state_at(device, device.num_computed - 1 - before_last)
        assert device.params.seed is not None
        return sample(state, len(device.token_ids), sampling_key(device.params.seed, device.choice_index))

    def state_at(self, device: DeviceRow, position: int) -> int:
        return int(self.kv[device.blocks[position // self.block_size], position % self.block_size])
