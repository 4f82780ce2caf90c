"""A device for tests of the host half: rows, block tables and a KV cache, but arithmetic instead of a model.

Each KV slot holds a number chained from the slot before it (read through the block table) and the token written; the
next token is a function of the last slot. So a token comes out right only if every block holds what it should, and
`expected_tokens` computes the same without any cache. Misuse (a row used twice, a block written by two requests, a
block handed out while a letter that may write it is out) fails at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.engine.executor.base import Executor
from app.engine.sampling_params import SamplingParams
from app.engine.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenLogprobs
from app.engine.worker_info import WorkerInfo

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
    """The first `count` output tokens, without cache, rows or letters."""
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


class FakeExecutor(Executor):
    """`late`: like a GPU worker, call N returns the output of step N - 1, and a flush returns everything."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, *, late: bool = False, max_num_batched_tokens: int = 1 << 30
    ) -> None:
        self.info = WorkerInfo(num_blocks, "fake", "int")
        self.block_size = block_size
        self.late = late
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = np.full((num_blocks, block_size), -1, np.int64)
        self.rows: dict[int, DeviceRow] = {}
        self.calls: deque[list[ModelRunnerOutput]] = deque()
        self.behind: list[ModelRunnerOutput] = []
        self.unreturned: dict[int, dict[int, int]] = {}  # step -> block -> occupant that writes it
        self.letters: list[SchedulerOutput] = []
        self.num_occupants = 0
        self.max_calls = 0
        self.parked = 0
        self.death: Exception | None = None

    def start(self) -> WorkerInfo:
        return self.info

    def submit(self, letter: SchedulerOutput) -> None:
        if self.death is not None:
            raise self.death
        self.letters.append(letter)
        output = self.execute(letter)
        if not self.late:
            self.calls.append([output])
        else:
            self.behind.append(output)
            keep = 0 if letter.flush else 1
            self.calls.append(self.behind[: len(self.behind) - keep])
            self.behind = self.behind[len(self.behind) - keep :]
        self.max_calls = max(self.max_calls, len(self.calls))

    def collect(self) -> list[ModelRunnerOutput]:
        if self.death is not None:
            raise self.death
        outputs = self.calls.popleft()
        for output in outputs:
            self.unreturned.pop(output.step_id, None)
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

    def execute(self, letter: SchedulerOutput) -> ModelRunnerOutput:
        for row in letter.freed_rows:
            del self.rows[row]
        for new in letter.new_requests:
            self.enter(new)
        for row, blocks in letter.new_blocks:
            self.rows[row].blocks += blocks
        rows = letter.rows.tolist()
        assert len(set(rows)) == len(rows), "a row twice in one letter"
        assert letter.num_tokens <= self.max_num_batched_tokens
        counts = letter.num_scheduled_tokens.tolist()
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = {}
        writers: dict[int, int] = {}
        for index, (row, count, samples) in enumerate(zip(rows, counts, letter.samples.tolist(), strict=True)):
            device = self.rows[row]
            start = device.num_computed
            self.compute(device, count, writers)
            assert samples == (device.num_computed == len(device.token_ids)), "samples tells the wrong story"
            if device.params.prompt_logprobs is not None and start < device.num_prompt_tokens:
                # Position p is described by the step that computes p - 1.
                end = min(device.num_computed + 1, device.num_prompt_tokens)
                entries = [logprobs_of(device.token_ids[p], p) for p in range(start + 1, end)]
                if entries:
                    prompt_logprobs[index] = (start + 1, entries)
            if samples:
                tokens.append(self.sample(device))
                wanted = device.params.logprobs is not None
                logprobs.append(logprobs_of(tokens[-1], len(device.token_ids)) if wanted else None)
                device.token_ids.append(tokens[-1])
        self.unreturned[letter.step_id] = writers
        return ModelRunnerOutput(
            letter.step_id, np.array(tokens, np.int32), logprobs if any(logprobs) else None, prompt_logprobs or None
        )

    def enter(self, new: NewRequest) -> None:
        assert new.row not in self.rows, "a row given away before it was freed"
        assert 0 <= new.num_computed_tokens < len(new.token_ids)
        assert new.sampling_params.seed is not None
        self.num_occupants += 1
        self.rows[new.row] = DeviceRow(
            new.token_ids.tolist(),
            new.num_prompt_tokens,
            new.num_computed_tokens,
            list(new.block_ids),
            new.sampling_params,
            self.num_occupants,
            new.choice_index,
            new.has_grammar,
        )

    def compute(self, device: DeviceRow, count: int, writers: dict[int, int]) -> None:
        assert count >= 1
        assert device.num_computed + count <= len(device.token_ids), "computes a token that does not exist"
        for position in range(device.num_computed, device.num_computed + count):
            block = device.blocks[position // self.block_size]
            assert writers.setdefault(block, device.occupant) == device.occupant, "two requests write one block"
            for out in self.unreturned.values():
                assert out.get(block, device.occupant) == device.occupant, "block handed out while a letter is out"
            previous = 0
            if position:
                before = position - 1
                previous = int(self.kv[device.blocks[before // self.block_size], before % self.block_size])
                assert previous >= 0, "reads a slot that nobody wrote"
            self.kv[block, position % self.block_size] = chain(previous, device.token_ids[position])
        device.num_computed += count

    def sample(self, device: DeviceRow) -> int:
        last = device.num_computed - 1
        state = int(self.kv[device.blocks[last // self.block_size], last % self.block_size])
        assert device.params.seed is not None
        return sample(state, len(device.token_ids), sampling_key(device.params.seed, device.choice_index))
