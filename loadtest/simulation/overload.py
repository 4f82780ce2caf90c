"""Overload in simulated time, over the real admission, load book and schedulers: only devices and clients are modelled.

Several tenants send requests at random (Poisson), one of them far more than its share. A client that is refused comes
again when it is told to, twice at most, as the SDKs of OpenAI and Anthropic do. What ends within its deadline counts.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.config.admission import AdmissionConfig
from app.deployments.router.admission import Admission as RouterAdmission
from app.deployments.router.retry_budget import RetryBudget
from app.deployments.routing.claim import Claim, Rejection
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import RouteQuery
from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.scheduler.admission import Admission as EngineAdmission
from app.engine.scheduler.scheduler import Scheduler, StepRules
from app.records.load_report import LoadReport
from app.records.request import Deadline, EngineRequest, Placement, ServiceClass
from app.records.request_bounds import RequestBounds
from app.records.sampling_params import SamplingParams
from app.records.step import ModelRunnerOutput, SchedulerOutput
from loadtest.simulation.speeds import Speeds

HOP_S = 0.001
HEARTBEAT_S = 0.1
BLOCK_SIZE = 16
NUM_BLOCKS = 8192
EOS, OTHER, VOCAB = 0, 1, 1000
MAX_RETRIES = 2
KEY = b"simulated"


@dataclass(slots=True, frozen=True)
class Setting:
    """`load` 1 is what the fleet can just do. `hostile_share` of it comes from the tenant `hostile`, who sends long
    prompts; the others share the rest evenly."""

    load: float
    hostile_share: float = 0.5
    num_others: int = 4
    num_replicas: int = 2
    max_num_seqs: int = 32
    length_s: float = 60.0
    deadline_s: float = 10.0
    prompts: tuple[int, int] = (200, 1200)  # tokens, from and to
    hostile_prompts: tuple[int, int] = (1000, 3000)
    max_tokens: int = 256  # that every request asks for; answers end before
    is_guarded: bool = True  # else first come, first served, and nothing is refused
    seed: int = 0


@dataclass(slots=True)
class Sent:
    """One request of a client, and what became of it; times in seconds of the simulation."""

    tenant: str
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_attempts: int = 0
    admitted_s: float | None = None
    ended_s: float | None = None
    is_late: bool = False  # ended by its deadline

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(slots=True)
class _Replica:
    """A scheduler, whose steps take as long as the modelled device says."""

    name: str
    scheduler: Scheduler
    admission: EngineAdmission
    sent: dict[str, Sent] = field(default_factory=dict)
    is_stepping: bool = False

    def report(self, number: int, max_num_seqs: int) -> LoadReport:
        stats = self.scheduler.stats()
        return LoadReport(
            *("simulated", self.name, "1", True, stats.num_running, stats.num_waiting, stats.outstanding_tokens),
            *(NUM_BLOCKS, BLOCK_SIZE, number, stats.outstanding_prefill_tokens),
            resident_tokens=(stats.num_blocks - stats.num_free_blocks) * BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            prefill_token_s=stats.prefill_token_s,
            decode_step_s=stats.decode_step_s,
            queued=stats.queued,
            begun_rate=stats.begun_rate,
        )


class OverloadedFleet:
    """`run` returns all requests once the last one has ended."""

    def __init__(self, setting: Setting, speeds: Speeds | None = None) -> None:
        self.now = 0.0
        self._setting = setting
        self._speeds = speeds or Speeds()
        self._random = random.Random(setting.seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._ids = itertools.count()
        self._left = 0
        config = AdmissionConfig()
        self._book = LoadBook(create_policy("prefix_aware"), clock=lambda: self.now)
        budget = RetryBudget(config.retry_share, config.min_retries_per_s, clock=lambda: self.now)
        self._admission = RouterAdmission(config, self._book, budget, random.Random(setting.seed))
        self._class = ServiceClass("default", config.default.share)
        self._replicas = {name: self._create(name) for name in map(str, range(setting.num_replicas))}

    def run(self) -> list[Sent]:
        """Send requests for `length_s` seconds."""
        requests = self._traffic()
        self._left = len(requests)
        for one in requests:
            self._at(one.at_s, self._ask, one)
        for number, replica in enumerate(self._replicas.values()):
            self._at(0.0, self._heartbeat, replica, number)
        while self._left:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)
        return requests

    def _create(self, name: str) -> _Replica:
        kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, hash_key=KEY, enable_prefix_caching=False)
        rules = StepRules(self._setting.max_num_seqs, max_num_batched_tokens=2048)
        scheduler = Scheduler(kv, rules, (EOS,), clock=lambda: self.now)
        bounds = RequestBounds(VOCAB, (EOS,), 8192)
        return _Replica(name, scheduler, EngineAdmission(kv, bounds, model="simulated", block_hash_key=KEY))

    def _traffic(self) -> list[Sent]:
        setting, requests = self._setting, list[Sent]()
        shares = {f"tenant-{i}": (1 - setting.hostile_share) / setting.num_others for i in range(setting.num_others)}
        for tenant, share in {**shares, "hostile": setting.hostile_share}.items():
            prompts = setting.hostile_prompts if tenant == "hostile" else setting.prompts
            seconds, at_s = self._work_s(sum(prompts) / 2, setting.max_tokens / 2), 0.0
            per_s = setting.load * share * setting.num_replicas / seconds
            while per_s and (at_s := at_s + self._random.expovariate(per_s)) < setting.length_s:
                size = self._random.randint(*prompts), self._random.randint(8, setting.max_tokens - 8)
                requests.append(Sent(tenant, at_s, *size))
        return requests

    def _work_s(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """Seconds that a request takes of a replica whose rows are all taken."""
        rows = self._setting.max_num_seqs
        step_s = self._speeds.decode_s(rows, rows * (num_prompt_tokens + num_output_tokens / 2))
        return self._speeds.prefill_s(round(num_prompt_tokens)) + num_output_tokens * step_s / rows

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action, arguments))

    # ---- requests

    def _ask(self, sent: Sent) -> None:
        """The client sends it, for the first time or again."""
        sent.num_attempts += 1
        query, claim = RouteQuery(sent.num_prompt_tokens, self._setting.max_tokens), None
        if self._setting.is_guarded:
            is_retry = sent.num_attempts > 1
            claim = Claim(self._class, sent.tenant, self._setting.deadline_s, is_retry=is_retry)
        answer = self._admission.answer(query, claim)
        if isinstance(answer, Rejection):
            if sent.num_attempts > MAX_RETRIES:
                self._left -= 1
            else:
                self._at(self.now + answer.retry_after_s, self._ask, sent)
        elif answer is None:
            self._at(self.now + HEARTBEAT_S, self._ask, sent)
        else:
            assert not hasattr(answer, "wait_s")
            sent.admitted_s = self.now
            self._at(self.now + HOP_S, self._arrive, sent, self._replicas[answer.replica_id])

    def _arrive(self, sent: Sent, replica: _Replica) -> None:
        placement = Placement()
        if self._setting.is_guarded:
            deadline = Deadline(self._setting.deadline_s)
            placement = Placement(tenant=sent.tenant, service_class=self._class, deadline=deadline)
        params, name = SamplingParams(max_tokens=self._setting.max_tokens, seed=0), str(next(self._ids))
        made = EngineRequest(name, [OTHER] * sent.num_prompt_tokens, params, placement=placement)
        request = replica.admission.admit(made)
        request.arrival = self.now
        replica.sent[name] = sent
        replica.scheduler.add(request)
        if not replica.is_stepping:
            self._step(replica)

    # ---- replicas

    def _heartbeat(self, replica: _Replica, number: int) -> None:
        self._take(replica, replica.scheduler.end_late())
        self._book.report(replica.report(number, self._setting.max_num_seqs))
        self._at(self.now + HEARTBEAT_S, self._heartbeat, replica, number)

    def _step(self, replica: _Replica) -> None:
        message = replica.scheduler.schedule()
        replica.is_stepping = message is not None
        if message is None:
            return
        seconds = self._step_s(message, replica.scheduler)
        output = ModelRunnerOutput(message.step_id, self._tokens(message, replica), step_time_s=seconds)
        self._at(self.now + seconds, self._stepped, replica, output)

    def _step_s(self, message: SchedulerOutput, scheduler: Scheduler) -> float:
        counts = message.num_scheduled_tokens
        decodes = message.rows[counts == 1]
        resident = float(scheduler.rows.num_computed[decodes].sum())
        prefill_s = sum(self._speeds.prefill_s(int(count)) for count in counts[counts > 1])
        return self._speeds.step_s(prefill_s, len(decodes), resident)

    def _tokens(self, message: SchedulerOutput, replica: _Replica) -> np.ndarray[Any, np.dtype[np.int32]]:
        """An end of the answer where its length has been reached, for each row that samples."""
        tokens = []
        for row in message.rows[message.samples].tolist():
            request = replica.scheduler.rows.request_at(row)
            length = replica.sent[request.request_id].num_output_tokens
            tokens.append(EOS if request.num_output_tokens + 1 >= length else OTHER)
        return np.array(tokens, np.int32)

    def _stepped(self, replica: _Replica, output: ModelRunnerOutput) -> None:
        self._take(replica, replica.scheduler.update_from_output(output))
        self._step(replica)

    def _take(self, replica: _Replica, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                sent = replica.sent.pop(output.request_id)
                sent.ended_s, sent.is_late = self.now, output.is_late
                self._left -= 1
