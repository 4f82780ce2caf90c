"""An EngineCore in a thread of its own, driven by thread-safe calls.

One thread owns the core and the executor from start to shutdown, as Ray's compiled graph requires. Outputs leave by
one call a step. Every request that was accepted ends with exactly one final output, also when the engine dies (I7).
With nothing to do, the thread waits on a condition and the workers are parked: an idle engine costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from app.engine import control
from app.engine.bundles import Bundles
from app.engine.core import EngineCore
from app.engine.step_limit import StepLimit
from app.errors import EngineDeadError, InvalidRequestError
from app.records.bundle import parts_of
from app.records.outputs import EngineOutput, FinishReason
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.stats import EngineStats
from app.records.worker_info import WorkerInfo
from app.structured.structured_outputs import StructuredOutputs

logger = logging.getLogger("manta.engine")

HANG_GRACE_S = 5.0  # the executor itself gives up a hung step at its limit, and knows which worker it was
CONTROL_POLL_S = 0.005  # a control call that waits, with no step to wait for
PARK_AFTER_S = 0.05  # waking a parked worker takes milliseconds, so a short gap between requests does not park


class AsyncEngine:
    """`on_outputs(outputs)` and `on_fatal(error)` are called on the engine's thread: they must be quick."""

    def __init__(
        self,
        core: EngineCore,
        on_outputs: Callable[[list[EngineOutput]], None],
        on_fatal: Callable[[BaseException], None],
        *,
        park_after_s: float = PARK_AFTER_S,
        warm_grammars: bool = False,
    ) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._on_fatal = on_fatal
        self._park_after_s = park_after_s
        self._warm_grammars = warm_grammars
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._condition = threading.Condition()  # guards the next six fields
        self._controls: dict[Future[Any], Generator[None, None, Any]] = {}  # calls without an answer
        self._commands: deque[Callable[[], None]] = deque()
        self._live: set[str] = set()  # accepted requests without a final output
        self._stopping = False
        self._death: str | None = None
        self._started = False
        self._start_result: WorkerInfo | BaseException | None = None
        self._start_done = threading.Event()
        self._bundles = Bundles()
        self._given_up: set[str] = set()  # told an error, and not yet ended in the core; the engine's thread alone
        self._step_began: float | None = None  # monotonic; None between steps
        self._step_limit = StepLimit(core.config.step_timeout_s)

    # ---- any thread

    def start(self) -> WorkerInfo:
        """Start thread and workers and wait until the first step can run; raises what the workers raised."""
        self._thread.start()
        self._start_done.wait()
        result = self._start_result
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result

    def add_request(self, request: EngineRequest) -> None:
        """Accept a request: from now on it will get a final output. Compiles its grammar, if it brings a new one.

        Raises InvalidRequestError or PromptTooLongError (nothing was accepted), EngineDeadError when there is no
        engine to run it.
        """
        parts = parts_of(request) if request.asks else [request]  # without records it is no bundle
        prepared = list(map(self._core.prepare, parts))
        with self._condition:
            self._check_open()
            if request.request_id in self._live:
                raise InvalidRequestError(f"request_id: {request.request_id!r} is already in use", param="request_id")
            self._live.add(request.request_id)
            self._push(lambda: self._enqueue(request.request_id, prepared))

    def knows_grammar(self, spec: StructuredOutputs) -> bool:
        """True if a request with this grammar is taken, or refused, without compiling it."""
        return self._core.knows_grammar(spec)

    def abort(self, request_ids: list[str]) -> None:
        """End requests early; each still gets its final output. Unknown ids are ignored."""
        ids = list(request_ids)
        with self._condition:
            self._push(lambda: self._core.abort_requests(self._bundles.running(ids)))

    def end_late(self) -> None:
        """End requests whose deadline has passed. To be called every now and then: costs nothing while none has."""
        if self._core.next_deadline_s <= time.monotonic():
            with self._condition:
                self._push(self._core.end_late_requests)

    def pause(self, request_id: str) -> None:
        """Schedule nothing more for a request until `resume`."""
        with self._condition:
            self._push(lambda: self._core.pause(request_id))

    def resume(self, request_id: str) -> None:
        """Go on with a paused request."""
        with self._condition:
            self._push(lambda: self._core.resume(request_id))

    def control(self, name: str, arguments: Mapping[str, Any]) -> Future[Any]:
        """A control call (app/engine/control), run between steps; the workers have `start_timeout_s` for their part.

        To cancel the future takes back a call that waits. EngineDeadError when there is no engine to run it.
        """
        answer: Future[Any] = Future()
        call = control.begin(self._core, name, arguments)
        with self._condition:
            self._check_open()
            self._controls[answer] = call
            self._push(lambda: self._go_on(call, answer))
        return answer

    def stats(self) -> EngineStats:
        """A snapshot of the engine's state."""
        return self._core.stats()

    def step_limit_s(self) -> float:
        """Returns how long a step may take, in seconds, before it counts as hung; by the steps that there were."""
        max_step_tokens = self._core.scheduler.max_step_tokens  # an encoder's may be more than its option says
        return self._step_limit.limit_s(self._core.stats().prefill_token_s, max_step_tokens)

    def check_health(self) -> None:
        """Raise EngineDeadError when the engine cannot make progress: thread or worker gone, or a step that hangs."""
        with self._condition:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if not self._started or self._stopping or not self._thread.is_alive():
                raise EngineDeadError("the engine is not running")
        self._core.check_health()
        if (began := self._step_began) is not None:
            self._check_step(time.monotonic() - began)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Abort what still runs and stop thread and workers; idempotent."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("the engine's thread did not end within %g s; stopping its workers", timeout_s)
        self._core.shutdown()

    def _check_step(self, age_s: float) -> None:
        """Raise EngineDeadError when a step that has been running for so long hangs."""
        most_s = self._step_limit.most_s
        if age_s > most_s + min(most_s, HANG_GRACE_S):
            raise EngineDeadError(f"a step has been running for more than step_timeout_s={most_s:g} s")
        limit_s = self.step_limit_s()
        if limit_s < min(age_s, most_s):
            self._core.executor.give_up_step(f"has been running a step for more than {limit_s:.1f} s: it hangs")

    def _check_open(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._stopping or not self._started:
            raise EngineDeadError("the engine is not running")

    def _push(self, command: Callable[[], None]) -> None:
        if self._death is None and not self._stopping:
            self._commands.append(command)
            self._condition.notify()

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            info = self._core.start()
        except BaseException as error:
            self._start_result = error
            self._start_done.set()
            self._core.shutdown()
            return
        if self._warm_grammars:
            self._core.warm_grammars()
        with self._condition:
            self._started = True
        self._start_result = info
        self._start_done.set()
        try:
            self._loop()
            self._end_all(None)
        except BaseException as error:
            self._die(error)
        finally:
            self._core.shutdown()

    def _loop(self) -> None:
        while self._apply_commands():
            if self._core.has_work():
                if self._comes_somebody(self._core.spare_s()):
                    if not self._apply_commands():
                        return
                    if not self._core.has_work():
                        continue
                self._step_began = began = time.monotonic()
                outputs = self._core.step()
                self._step_began = None
                self._step_limit.note(time.monotonic() - began)
                self._publish(outputs)
            else:
                self._wait_for_work()

    def _apply_commands(self) -> bool:
        """Do what was asked for since the last step; False when the thread is to end."""
        with self._condition:
            if self._stopping:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return True

    def _go_on(self, call: Generator[None, None, Any], answer: Future[Any]) -> None:
        """Run a control call up to its end, or to where it waits; then it is a command of the next turn."""
        try:
            if answer.cancelled():
                call.close()
                self._answer(answer, None)
                return
            next(call)
        except StopIteration as done:
            self._answer(answer, done.value)
        except EngineDeadError as error:
            self._answer(answer, error)
            raise
        except Exception as error:
            self._answer(answer, error)
        else:
            if not self._core.has_work():
                time.sleep(CONTROL_POLL_S)
            with self._condition:
                self._push(lambda: self._go_on(call, answer))

    def _answer(self, answer: Future[Any], result: Any) -> None:
        with self._condition:
            self._controls.pop(answer, None)
        with suppress(InvalidStateError):  # cancelled
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    def _enqueue(self, request_id: str, parts: list[Request]) -> None:
        if len(parts) > 1:
            self._bundles.add(request_id, [part.request_id for part in parts])
        for part in parts:
            self._core.enqueue(part)

    def _is_called(self) -> bool:
        return self._stopping or bool(self._commands)

    def _comes_somebody(self, within_s: float) -> bool:
        """Wait for whoever asks for something within this time; True if somebody does."""
        if not within_s:
            return False
        with self._condition:
            return self._condition.wait_for(self._is_called, within_s)

    def _wait_for_work(self) -> None:
        with self._condition:
            if self._condition.wait_for(self._is_called, self._park_after_s):
                return
        while self._core.use_idle_time():
            if self._is_called():
                return
        self._core.executor.park()
        with self._condition:
            self._condition.wait_for(self._is_called)

    def _publish(self, outputs: list[EngineOutput]) -> None:
        outputs, left = self._bundles.gather(outputs)
        if left:
            self._core.abort_requests(left)
        if self._given_up:
            outputs = [output for output in outputs if not self._is_given_up(output)]
        if not outputs:
            return
        self._forget_ended(outputs)
        try:
            self._on_outputs(outputs)
        except Exception as error:  # the receiver's trouble must not stop everybody's tokens
            logger.exception("the receiver of outputs failed")
            self._give_up([output.request_id for output in outputs], f"internal error: output was lost: {error}")

    def _give_up(self, request_ids: list[str], error: str) -> None:
        """The receiver may have lost tokens of these requests, or their ends: each is told an error, by itself."""
        self._given_up |= self._core.scheduler.requests.keys() & set(request_ids)
        self._core.abort_requests(request_ids)
        for request_id in request_ids:
            final = [EngineOutput(request_id, [], finish_reason="error", error=error)]
            self._forget_ended(final)
            try:
                self._on_outputs(final)
            except Exception:
                logger.exception("the receiver did not take the end of request %s", request_id)

    def _is_given_up(self, output: EngineOutput) -> bool:
        """True if the request has been told its end already; forgotten once the engine's own end of it has come."""
        known = output.request_id in self._given_up
        if known and output.finish_reason is not None:
            self._given_up.discard(output.request_id)
        return known

    def _forget_ended(self, outputs: list[EngineOutput]) -> None:
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        if ended:
            with self._condition:
                self._live.difference_update(ended)

    def _end_all(self, error: str | None) -> None:
        """A final output for every live request: an error where there is a text, else an abort."""
        with self._condition:
            live, self._live = sorted(self._live), set()
            controls = list(self._controls.items())
            self._commands.clear()
        for answer, call in controls:
            self._close(call)
            self._answer(answer, EngineDeadError(error or "the engine was shut down"))
        reason: FinishReason = "abort" if error is None else "error"
        self._publish([EngineOutput(request_id, [], finish_reason=reason, error=error) for request_id in live])

    def _close(self, call: Generator[None, None, Any]) -> None:
        """Take back a call that waits, here and now, not when and where the garbage collector finds it."""
        try:
            call.close()
        except Exception:  # it may ask workers that are gone
            logger.debug("a control call did not end well", exc_info=True)

    def _die(self, error: BaseException) -> None:
        """No way back: tell every request, then the owner."""
        logger.error("the engine died", exc_info=error)
        text = error.message if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        with self._condition:
            self._death = f"the engine died: {text}"
        self._step_began = None
        self._end_all(self._death)
        try:
            self._on_fatal(error)
        except Exception:
            logger.exception("the receiver of the fatal error failed")
