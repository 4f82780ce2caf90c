"""The engine's heart: requests in, steps out to the executor, outputs back. No threads; its clock is for metrics only.

Up to `max_inflight_steps` step messages are in flight (I2): while the workers compute one step, the next one is being
scheduled. With 1, every step message asks for its own output at once: synchronous stepping, with the same tokens. A
worker that computes in the background returns a step's output with the next step message; when there is none, a flush
fetches it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.adapters.book import AdapterBook
from app.engine.adapters.loads import AdapterLoads
from app.engine.assembly import Assembly
from app.engine.executor.base import Executor
from app.engine.scheduler.admission import Admission
from app.engine.scheduler.plan_time import PlanTime
from app.engine.scheduler.scheduler import Scheduler
from app.errors import EngineAsleepError, EngineDeadError, InvalidRequestError, ModelNotFoundError
from app.records.adapter import AdapterAsk
from app.records.engine_state import EngineState, HoldReason
from app.records.kv_events import KVEventSink
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.request_bounds import RequestBounds
from app.records.request_state import Request
from app.records.stats import EngineStats, StatsRecorder
from app.records.step import SchedulerOutput
from app.records.worker_info import WorkerInfo
from app.structured.compiler import GrammarCompiler
from app.structured.structured_outputs import StructuredOutputs


class EngineCore:
    """One engine. One thread drives it; `prepare`, `stats` and `check_health` may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        executor: Executor,
        block_hash_key: bytes,
        *,
        recorder: StatsRecorder | None = None,
        kv_event_sink: KVEventSink | None = None,
        given: EngineConfig | None = None,
    ) -> None:
        """`given`: the options without a drafter that nobody asked for; None: there is none."""
        self.config = config
        self.info = info
        self.executor = executor
        self._assembly = Assembly(info, block_hash_key, recorder, kv_event_sink, given or config)
        self._recorder = recorder
        self._scheduler: Scheduler | None = None
        self._admission: Admission | None = None
        self._grammars: GrammarCompiler | None = None
        self._num_calls = 0  # submitted and not collected
        self._ready: list[EngineOutput] = []  # final outputs made outside of a step
        self.is_profiling = False
        self.last_traces: list[str] = []  # of a profile that has ended by itself
        self._wait_s = self._update_s = 0.0  # of this step
        self._plan_time = PlanTime()
        self.state = EngineState()
        self._most_inflight = config.max_inflight_steps  # 0 while frozen
        self._held: set[str] = set()  # requests that came while new ones wait
        self._num_deferred = 0  # pieces of the workers' start that are left for idle time
        self.adapters = AdapterBook()
        self._adapter_loads = AdapterLoads(self) if config.enable_lora and config.max_disk_loras else None

    # ---- life

    def start(self) -> WorkerInfo:
        """Start the workers, and what schedules and admits by what they report; ConfigError, CheckpointError, ..."""
        parts = self._assembly.start(self.executor, self.config)
        self.executor, self.config = parts.executor, parts.config
        self._scheduler, self._admission, self._grammars = parts.scheduler, parts.admission, parts.grammars
        self._num_deferred = parts.workers.num_deferred
        if self._scheduler.adapters is not None:
            self._scheduler.adapters.has = lambda digest: digest in self.adapters.loaded
        return parts.workers

    def shutdown(self) -> None:
        """Stop the workers; idempotent."""
        if self._grammars is not None:
            self._grammars.close()
        self.executor.shutdown()

    def warm_grammars(self) -> None:
        """Bring up what compiles grammars, without waiting, so that the first one meets no cold start."""
        if self._grammars is not None:
            self._grammars.warm()

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone."""
        self.executor.check_health()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; there is none before `start`."""
        if self._scheduler is None:
            raise EngineDeadError("the engine has not been started")
        return self._scheduler

    @property
    def bounds(self) -> RequestBounds:
        """Returns what a request may ask for."""
        return self._started_admission.bounds

    @property
    def _started_admission(self) -> Admission:
        if self._admission is None:
            raise EngineDeadError("the engine has not been started")
        return self._admission

    # ---- requests

    def prepare(self, request: EngineRequest) -> Request:
        """Check a request and make it ready for `enqueue`; InvalidRequestError, PromptTooLongError, ModelNotFoundError.

        Compiles the grammar of one with structured outputs: milliseconds, in which the caller waits.
        """
        state = self.state
        if (state.asleep or state.weights_missing) and (why := state.refusal) is not None:
            raise EngineAsleepError(why)
        if (gone := self._missing_adapter(request)) is not None:
            raise ModelNotFoundError(gone, param="model")
        return self._started_admission.admit(request)

    def _missing_adapter(self, request: EngineRequest) -> str | None:
        """Returns what to say of a request whose adapter is not there."""
        ask = request.asked(AdapterAsk)
        if ask is None or ask.digest in self.adapters.loaded or self.adapters.of(ask.digest) is not None:
            return None
        return f"the adapter {ask.name!r} is not loaded"

    def enqueue(self, request: Request) -> None:
        """Hand a prepared request to the scheduler; InvalidRequestError when its id is in use."""
        if request.request_id in self.scheduler.requests:
            raise InvalidRequestError(f"request_id: {request.request_id!r} is already in use", param="request_id")
        if (gone := self._missing_adapter(request.spec)) is not None:  # it went after `prepare`
            self._ready.append(EngineOutput(request.request_id, [], finish_reason="error", error=gone))
            return
        if (ask := request.spec.asked(AdapterAsk)) is not None:
            self.adapters.use(ask.digest)
        self._started_admission.renew(request)
        self.scheduler.add(request)
        if self.state.is_paused:
            self._held.add(request.request_id)
            self.scheduler.set_paused(request.request_id, True)
        if request.matcher is not None and request.matcher.is_complete:  # cut off between its last token and its end
            self._ready.append(self.scheduler.finish(request, "stop"))

    def add_request(self, request: EngineRequest) -> None:
        """`prepare` and `enqueue`."""
        self.enqueue(self.prepare(request))

    def knows_grammar(self, spec: StructuredOutputs) -> bool:
        """True if a request with this grammar is taken, or refused, without compiling it."""
        return self._grammars is None or self._grammars.knows(spec)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests early; each gets a final output with the next step. Unknown ids are ignored."""
        self._ready += self.scheduler.abort(request_ids)

    @property
    def next_deadline_s(self) -> float:
        """When a request may be late next (monotonic); may be asked from any thread."""
        return self.scheduler.deadlines.next_s

    def end_late_requests(self) -> None:
        """End requests whose deadline has passed; each gets a final output with the next step."""
        self._ready += self.scheduler.end_late()

    def pause(self, request_id: str) -> None:
        """Hold a request: it keeps its place, but computes nothing until `resume`."""
        self.scheduler.set_paused(request_id, True)

    def resume(self, request_id: str) -> None:
        """Let a held request go on."""
        if request_id not in self._held:
            self.scheduler.set_paused(request_id, False)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's state."""
        state, revision = self.state, self._started_admission.revision
        held, level, refusal = state.held, state.sleep_level, state.refusal
        stats = self.scheduler.stats()
        book = self.adapters
        adapters = stats.adapters._replace(known=book.known, on_disk=book.on_disk, read_s=book.read_s)
        stats = replace(stats, adapters=adapters, held=held, refusal=refusal)
        return replace(stats, sleep_level=level, model_revision=revision)

    # ---- what an operator asks for (app/engine/control), with no step out

    def hold(self, reason: HoldReason) -> None:
        """From now on new requests wait; those that are here go on, unless `freeze` follows."""
        self.state.holds.add(reason)

    def freeze(self) -> None:
        """Compute nothing until the last hold is released."""
        self._most_inflight = 0

    def release(self, reason: HoldReason) -> None:
        """Take a hold back; with the last one, all requests go on."""
        self.state.holds.discard(reason)
        if self.state.is_paused:
            return
        self._most_inflight = self.config.max_inflight_steps
        for request_id in self._held:
            self.scheduler.set_paused(request_id, False)
        self._held.clear()

    @property
    def is_frozen(self) -> bool:
        """True if nothing is computed."""
        return self._most_inflight == 0

    @property
    def is_drained(self) -> bool:
        """True if all requests that are here came after the hold."""
        return self.scheduler.requests.keys() <= self._held

    def forget_prefixes(self) -> None:
        """No block of the prefix cache is found again, in no tier."""
        self.scheduler.kv.forget()

    def tidy_adapters(self) -> None:
        """Drop the adapters without a name that no request has."""
        asks = (request.spec.asked(AdapterAsk) for request in self.scheduler.requests.values())
        used = {ask.digest for ask in asks if ask is not None}
        for digest in self.adapters.nameless - used:
            self.adapters.drop(digest)
            self.call_workers("call_feature", "drop_adapter", digest)

    def use_revision(self, revision: str) -> None:
        """The weights are others now: what is here and has given nothing yet is computed with them; see `restart`."""
        self._started_admission.revision = revision
        for request in self.scheduler.requests.values():
            self._started_admission.renew(request)

    def restart(self, error: str) -> None:
        """All requests begin anew; one that has given tokens, which another run may not give, ends with `error`."""
        self.scheduler.preempt_all()
        self._end([request for request in self.scheduler.requests.values() if request.num_output_tokens], error)

    def end_all(self, error: str) -> int:
        """All requests end with `error`; how many there were."""
        return self._end(list(self.scheduler.requests.values()), error)

    def end_with_error(self, request: Request, error: str) -> None:
        """One request ends with an error."""
        self._end([request], error)

    def _end(self, requests: list[Request], error: str) -> int:
        self._ready += [self.scheduler.finish(request, "error", error=error) for request in requests]
        return len(requests)

    # ---- steps

    @property
    def is_computing(self) -> bool:
        """True if a step is out."""
        return self._num_calls > 0

    @property
    def wants_more(self) -> bool:
        """True if further requests might be in the step that goes out next."""
        return not self.scheduler.has_step_waiting()

    def has_work(self) -> bool:
        """True if `step` would bring anything."""
        return bool(self._ready) or self._num_calls > 0 or (self._most_inflight > 0 and self.scheduler.has_work())

    def spare_s(self) -> float:
        """Returns for how long the next step need not be planned: who comes until then is in it."""
        scheduler = self.scheduler
        has_stages = self.config.pipeline_parallel_size > 1  # the first has nothing to do while the last computes
        if self._ready or self._num_calls or has_stages or self._most_inflight != 2 or scheduler.num_unreturned != 1:
            return 0.0
        return self._plan_time.spare_s(time.monotonic(), scheduler.running_s())

    def step(self) -> list[EngineOutput]:
        """Fill the workers' queue, wait for the oldest call, return the outputs it brought (possibly none).

        EngineDeadError from the executor is final. Anything else raised here is a bug in this process.
        """
        scheduler = self.scheduler
        began = time.monotonic()
        self._wait_s = self._update_s = 0.0
        while scheduler.num_unreturned < self._most_inflight:
            step_message = scheduler.schedule()
            if step_message is None:
                break
            step_message.flush = step_message.flush or self.config.max_inflight_steps == 1
            self._submit(step_message)
        schedule_s = time.monotonic() - began
        is_loading = self._adapter_loads is not None and self._adapter_loads.is_busy
        if self._adapter_loads is not None and is_loading:
            self._adapter_loads.advance()
        if self._num_calls == 0 and scheduler.num_unreturned:
            self._flush()
        elif self._num_calls:
            self._collect()
        elif scheduler.has_work() and not (self._ready or scheduler.has_failed or is_loading):
            raise RuntimeError("nothing can be scheduled, although requests wait and no step is out")
        outputs = self._ready + scheduler.take_failed()
        self._ready = []
        if self.adapters.nameless and any(output.finish_reason for output in outputs):
            self.tidy_adapters()
        if self._recorder is not None:
            self._recorder.record_phases(schedule_s, self._wait_s, self._update_s)
        return outputs

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker between two steps; its results, by rank."""
        self.settle()
        return self.executor.call(method, *arguments)

    def defer(self, counts: list[int]) -> None:
        """So many pieces of work each worker has left for idle time. They go on together or not at all: steps whose
        ranks have other graphs would not fit together."""
        self._num_deferred = min(counts, default=0)

    def use_idle_time(self) -> bool:
        """Nothing runs: do a piece of what the start left for later, which takes a fraction of a second; whether more
        is left."""
        if self._num_deferred and not self.is_frozen:
            self.defer(self.call_workers("capture_next"))
            return self._num_deferred > 0
        return False

    def settle(self) -> None:
        """Wait for the steps in flight; what they bring comes with the next `step`."""
        while self._num_calls:
            self._collect()
        if self.scheduler.num_unreturned:
            self._flush()

    def _flush(self) -> None:
        """Fetch what the workers hold back of the steps that they have executed."""
        self._submit(self.scheduler.flush_message())
        self._collect()
        if self.scheduler.num_unreturned:
            raise EngineDeadError("the workers did not return the outputs of a flushed step")

    def _submit(self, step_message: SchedulerOutput) -> None:
        self.executor.submit(step_message)
        self._num_calls += 1
        if num_tokens := step_message.num_tokens:
            self._plan_time.send(time.monotonic(), is_long=num_tokens > len(step_message.rows))

    def _collect(self) -> None:
        began = time.monotonic()
        returned = self.executor.collect()
        came = time.monotonic()
        self._num_calls -= 1
        for output in returned:
            self._plan_time.take(came, output.step_time_s, was_over=output.was_over)
            self._ready += self.scheduler.update_from_output(output)
        self._wait_s += came - began
        self._update_s += time.monotonic() - came
