"""One engine's life drawn from a seed, over a device whose tokens depend on every cached slot.

Drawn are the engine (pipeline stages, steps in flight, a pool that mostly is too small, token budget, rows, policy,
prefix caching, a host tier) and what happens to it: prompts that share beginnings, several choices of one prompt,
priorities, grammars, logprobs, aborts, pauses. Whatever is drawn, every request ends once with the tokens that it gets
alone, the engine goes on, and nothing is held in the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.config.engine import EngineConfig
from app.config.speculative import SpeculativeConfig
from app.engine.core import EngineCore
from app.engine.kv_cache import state_manager
from app.engine.scheduler import starts as starts_module
from app.engine.scheduler import token_masks as token_masks_module
from app.records.kv_groups import WHOLE, KVGroups, Windows
from app.records.request import EngineRequest
from app.records.state_pool import StatePool
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.structured.masks import DraftMasks
from app.structured.matcher import Matcher
from tests.engine.core_driver import KEY, Results, assert_idle, fake_info, make_request
from tests.engine.fake_executor import VOCAB, DeviceRow, expected_tokens, sampling_key
from tests.engine.kv_cache.state_device import StateDevice

MAX_STEPS = 60_000


class CountingMatcher(Matcher):
    """A grammar that lets any token pass and ends after `length` of them. Its mask is the number of tokens it saw."""

    def __init__(self, length: int, seen: int = 0) -> None:
        self.length, self.seen, self.num_words = length, seen, 1

    @property
    def is_active(self) -> bool:
        return True

    @property
    def is_complete(self) -> bool:
        return self.seen >= self.length

    def accept(self, token: int) -> None:
        assert self.seen < self.length, "a token after the grammar's end"
        self.seen += 1

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        mask[0] = self.seen


def fill_masks(matchers: list[CountingMatcher]) -> NDArray[np.int32]:
    """Without the threads of the real one."""
    words = np.zeros((len(matchers), 1), np.int32)
    for matcher, row in zip(matchers, words, strict=True):
        matcher.fill_mask(row)
    return words


def mask_drafts(proposed: list[tuple[CountingMatcher, list[int]]]) -> list[DraftMasks | None]:
    """As many drafts as tokens are left; none, and no masks, at every fifth token."""
    found: list[DraftMasks | None] = []
    for matcher, drafts in proposed:
        count = min(len(drafts), matcher.length - matcher.seen)
        words = np.arange(matcher.seen, matcher.seen + count + 1, dtype=np.int32)[:, None]
        found.append(None if matcher.seen % 5 == 4 else DraftMasks(count, words))
    return found


class Device(StateDevice):
    """Every row with a grammar must sample under a mask made after its latest token, and after each of its drafts."""

    def execute(self, step_message: SchedulerOutput) -> ModelRunnerOutput:
        masks = step_message.masks
        self.masks = {} if masks is None else dict(zip(masks.indices.tolist(), masks.words[:, 0].tolist(), strict=True))
        self.num_sampled = 0
        return super().execute(step_message)

    def verify(self, device: DeviceRow, k: int, step: SchedulerOutput) -> list[int]:
        for place in range(k + 1):
            wanted = len(device.token_ids) - device.num_prompt_tokens + place if device.has_grammar else None
            assert self.masks.get(self.num_sampled) == wanted, "the mask belongs to another token"
            self.num_sampled += 1
        return super().verify(device, k, step)


@dataclass
class Sent:
    request: EngineRequest
    length: int  # tokens that it will get
    grammar: int | None = None  # tokens that its grammar lets pass; None: it has none
    aborted: bool = False


@dataclass
class RandomRun:
    """`RandomRun(seed, monkeypatch).play()`; `num_stages` fixes what the seed would draw. A plain one has steps that
    need no plan: nobody drafts, has a grammar, or waits for long."""

    seed: int
    monkeypatch: pytest.MonkeyPatch
    num_stages: int | None = None
    is_plain: bool = False
    has_windows: bool = False  # layers in groups, some of which keep only a window
    has_states: bool = False  # layers that keep states
    has_kills: bool = False  # engines are lost, and others go on with what they ran
    each_step: Callable[[EngineCore], None] | None = None
    results: Results = field(default_factory=Results)
    sent: dict[str, Sent] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    num_kills: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.monkeypatch.setattr(token_masks_module, "fill_masks", fill_masks)
        self.monkeypatch.setattr(token_masks_module, "mask_drafts", mask_drafts)
        self.monkeypatch.setattr(starts_module, "MIN_SHARED_TOKENS", rng.choice([1, 4, 128]))
        block_size, num_blocks = rng.choice([1, 2, 4, 16]), rng.choice([6, 10, 24, 64])
        self.pool_tokens = block_size * num_blocks
        stages = rng.randint(1, 4)
        stages = self.num_stages or stages
        budget, num_slots = rng.choice([1, 2, 3, 7, 16, 64]), rng.choice([0, 0, 4, 16])
        config = EngineConfig(
            executor="local_processes",
            pipeline_parallel_size=stages,
            block_size=block_size,
            max_inflight_steps=rng.randint(1, stages + 2),
            max_num_batched_tokens=budget,
            max_num_seqs=rng.choice([1, 2, 5, 16]),
            enable_prefix_caching=num_slots > 0 or rng.random() < 0.8,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
        )
        late, delay = rng.random() < 0.5, rng.randint(0, 5)
        most_drafts = 0 if self.is_plain or self.has_states else rng.choice([0, 1, 4])
        if self.has_states:
            most_drafts = random.Random(self.seed).choice([0, 1, 4])
        if most_drafts and self.seed % 2:  # as many as random times of steps make worth it
            config = config.model_copy(update={"speculative_config": SpeculativeConfig(method="ngram")})
        drafts = {"num_draft_tokens": most_drafts, "draft_quality": rng.choice([0.0, 0.5, 0.9, 1.0])}
        windows = self.draw_windows() if self.has_windows else WHOLE
        if self.has_windows:
            groups = KVGroups(windows, block_size)
            num_blocks = max(num_blocks * len(windows), groups.num_blocks(2 * block_size) + 1)
            self.pool_tokens = min(self.pool_tokens, groups.max_tokens(num_blocks - 1))

        def made() -> Device:
            device = Device(
                num_blocks, num_slots, block_size, late=late, delay=delay, seed=self.seed, windows=windows, **drafts
            )
            device.max_num_batched_tokens = budget
            if self.has_states:
                self.monkeypatch.setattr(state_manager, "INTERVAL", 16)
                self.monkeypatch.setattr(state_manager, "ROLLING", 16)
                device.info = replace(device.info, states=StatePool(8, None, rng.choice([1, 2, 5])))
            return device

        self.made, self.config = made, config
        self.start()
        self.common = [rng.randrange(VOCAB) for _ in range(self.pool_tokens)]
        self.num_prompts = rng.randint(4, 20)

    def start(self) -> None:
        """A new engine on a new device."""
        self.device = self.made()
        self.core = EngineCore(self.config, fake_info(), self.device, KEY)
        self.core.start()

    def kill(self) -> None:
        """The engine is lost with all that it had not told; what it ran goes on in another one, behind what it had."""
        self.num_kills += 1
        self.start()
        self.paused.clear()
        for name in self.live:
            sent, tokens = self.sent[name], self.results.tokens.get(name, [])
            self.enqueue(replace(sent.request, output_token_ids=list(tokens)), sent.grammar)

    def draw_windows(self) -> Windows:
        rng = random.Random(self.seed)
        one, other = rng.choice([1, 2, 5, 16, 40]), rng.choice([1, 3, 7, 20])
        return rng.choice([(one,), (None, one), (None, one, one), (None, None, one), (one, other), (None, one, other)])

    def play(self) -> EngineCore:
        """Until all has ended; the core, for what it counted."""
        rng = self.rng
        for _ in range(MAX_STEPS):
            if self.num_prompts and rng.random() < 0.4:
                self.num_prompts -= 1
                self.send_prompt()
            self.interfere()
            core = self.core
            if core.has_work():
                self.results.take(core.step())
                if self.has_windows:
                    self.device.poison(core.scheduler.kv)
                if self.each_step is not None:
                    self.each_step(core)
            elif not self.num_prompts and not self.paused:
                break
        else:
            raise AssertionError("no end in sight")
        self.check()
        return self.core

    @property
    def live(self) -> list[str]:
        return [name for name in self.sent if name not in self.results.final]

    def send_prompt(self) -> None:
        """All choices of one prompt, which may be as long as the pool allows."""
        rng = self.rng
        length = rng.randint(1, self.pool_tokens - 1)
        if rng.random() < 0.5:
            length = min(length, 30)
        shared = rng.randint(0, length)
        prompt = self.common[:shared] + [rng.randrange(VOCAB) for _ in range(length - shared)]
        most = rng.randint(1, min(30, self.pool_tokens - length))
        wishes: dict[str, Any] = {"max_tokens": most, "seed": rng.randrange(99), "priority": rng.choice([0, 0, 1, 5])}
        wishes |= {name: 0 for name in ("prompt_logprobs", "logprobs") if rng.random() < 0.2}
        wishes["n"] = rng.choice([1, 1, 1, 2, 4])
        for choice in range(wishes["n"]):
            stops, ends_at = self.stop_of(expected_tokens(prompt, sampling_key(wishes["seed"], choice), most))
            self.send(make_request(f"{len(self.sent)}", prompt, choice_index=choice, **wishes, **stops), ends_at)

    def stop_of(self, answer: list[int]) -> tuple[dict[str, Any], int]:
        """At times a stop token out of the answer, which a step may bring in the midst of others; and the length."""
        rng, most = self.rng, len(answer)
        if rng.random() < 0.7:
            return {}, most
        token, least = rng.choice(answer), rng.choice([0, 0, most // 2])
        ends = [i for i, other in enumerate(answer, start=1) if other == token and i >= least]
        return {"stop_token_ids": [token], "min_tokens": least}, min(ends, default=most)

    def send(self, request: EngineRequest, most: int) -> None:
        grammar = self.rng.randint(1, 40) if self.rng.random() < 0.3 and not self.is_plain else None
        self.enqueue(request, grammar)
        self.sent[request.request_id] = Sent(request, most if grammar is None else min(most, grammar), grammar)

    def enqueue(self, request: EngineRequest, grammar: int | None) -> None:
        prepared = self.core.prepare(request)
        if grammar is not None:
            prepared.matcher = CountingMatcher(grammar, len(request.output_token_ids))
        self.core.enqueue(prepared)

    def interfere(self) -> None:
        """Aborts, pauses, resumes and deaths."""
        rng, live = self.rng, self.live
        if self.has_kills and live and rng.random() < 0.02:
            self.kill()
        self.paused &= set(live)
        if live and rng.random() < 0.05:
            name = rng.choice(live)
            self.sent[name].aborted = True
            self.core.abort_requests([name])
        if live and rng.random() < 0.1:
            name = rng.choice(live)
            self.core.pause(name)
            self.paused.add(name)
        if self.paused and rng.random() < (0.2 if self.num_prompts else 0.6):
            name = rng.choice(sorted(self.paused))
            self.core.resume(name)
            self.paused.discard(name)

    def check(self) -> None:
        """Exact tokens, the right ends, nothing held."""
        assert self.results.final.keys() == self.sent.keys()
        for name, sent in self.sent.items():
            request, final, tokens = sent.request, self.results.final[name], self.results.tokens[name]
            assert request.sampling.seed is not None
            key = sampling_key(request.sampling.seed, request.choice_index)
            wanted = expected_tokens(request.prompt_token_ids, key, sent.length)
            if final.finish_reason == "abort":
                assert sent.aborted
                assert tokens == wanted[: len(tokens)], name
            else:
                assert tokens == wanted, name
                assert final.finish_reason in ("length", "stop"), final
        assert_idle(self.core)
