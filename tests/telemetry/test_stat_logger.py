"""Stat loggers get the figures at intervals, and none of them can hold up who gives them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from app.telemetry.metrics_recorder import MetricsRecorder
from app.telemetry.stat_logger import Figures, LogLine, StatLogger, StatLoggers, figures_of
from tests.limits import patience_s, wait_until

LABELS = {"model_name": "m", "engine": "0"}


class Diary(StatLogger):
    """Writes down what it is told; waits while `gate` is closed, raises while `fails`."""

    seen: list[Figures]
    gate = threading.Event()
    entered = threading.Event()
    closed = threading.Event()
    fails = False

    def record(self, figures: Figures) -> None:
        self.entered.set()
        assert self.gate.wait(patience_s())
        if self.fails:
            raise RuntimeError("no space")
        self.seen.append(figures)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def diary() -> Iterator[type[Diary]]:
    Diary.seen, Diary.fails = [], False
    for event in (Diary.gate, Diary.entered, Diary.closed):
        event.clear()
    yield Diary
    Diary.gate.set()


def _recorder(running: int = 0) -> MetricsRecorder:
    recorder = MetricsRecorder(LABELS)
    recorder.set("vllm:num_requests_running", running)
    return recorder


def test_figures_have_the_names_of_prometheus() -> None:
    recorder = _recorder(3)
    recorder.increment("vllm:request_success_total", 2.0, "stop")
    recorder.observe("vllm:time_to_first_token_seconds", 0.25)
    recorder.observe("manta:step_seconds", 0.5, "device")
    figures = figures_of(recorder.series())
    assert figures["vllm:num_requests_running"] == 3
    assert figures['vllm:request_success_total{finished_reason="stop"}'] == 2
    assert figures["vllm:time_to_first_token_seconds_sum"] == 0.25
    assert figures["vllm:time_to_first_token_seconds_count"] == 1
    assert figures['manta:step_seconds_count{phase="device"}'] == 1
    recorder.set("vllm:num_requests_running", 4)
    assert figures["vllm:num_requests_running"] == 3  # a copy: the recorder goes on


def test_they_are_told_at_intervals(diary: type[Diary]) -> None:
    diary.gate.set()
    loggers = StatLoggers({"diary": diary}, LABELS, 10.0)
    told = [now for now in (0.0, 1.0, 9.0, 10.5, 12.0, 21.0) if loggers.is_due(now) and _publish(loggers, now, diary)]
    assert told == [0.0, 10.5, 21.0]
    assert [each["vllm:num_requests_running"] for each in diary.seen] == [0, 10, 21]
    loggers.close()
    assert diary.closed.wait(patience_s())
    assert not StatLoggers({}, LABELS, 10.0).is_due(100.0)


def _publish(loggers: StatLoggers, now: float, diary: type[Diary]) -> bool:
    count = len(diary.seen)
    loggers.publish(_recorder(int(now)).series(), now)
    wait_until(lambda: len(diary.seen) > count)
    return True


def test_one_that_hangs_keeps_the_newest_figures_and_nobody_waits(
    diary: type[Diary], caplog: pytest.LogCaptureFixture
) -> None:
    loggers = StatLoggers({"diary": diary}, LABELS, 1.0)
    loggers.publish(_recorder(0).series(), 0.0)
    assert diary.entered.wait(patience_s())
    for turn in range(1, 51):
        loggers.publish(_recorder(turn).series(), float(turn))  # with the gate closed: it would hang here
    with caplog.at_level(logging.WARNING, "manta.stats"):
        diary.gate.set()
        wait_until(lambda: len(diary.seen) == 2)
    assert [each["vllm:num_requests_running"] for each in diary.seen] == [0, 50]
    assert [record.getMessage() for record in caplog.records] == [
        "stat logger diary is slower than stat_logger_interval_s: 49 times its figures were replaced"
    ]


def test_one_that_raises_is_told_again_and_said_once(diary: type[Diary], caplog: pytest.LogCaptureFixture) -> None:
    diary.gate.set()
    diary.fails = True
    with caplog.at_level(logging.WARNING, "manta.stats"):
        loggers = StatLoggers({"diary": diary}, LABELS, 1.0)
        for turn in range(3):
            diary.entered.clear()
            loggers.publish(_recorder(turn).series(), float(turn))
            assert diary.entered.wait(patience_s())
        diary.fails = False
        loggers.publish(_recorder(7).series(), 3.0)
        wait_until(lambda: bool(diary.seen) and diary.seen[-1]["vllm:num_requests_running"] == 7)
    messages = [record.getMessage() for record in caplog.records if "slower" not in record.getMessage()]
    assert messages == ["stat logger diary failed: RuntimeError: no space"]


def test_the_log_line_counts_since_the_last_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 15.0])
    monkeypatch.setattr("app.telemetry.stat_logger.time.monotonic", lambda: next(clock))
    line, recorder = LogLine(LABELS), _recorder(2)
    with caplog.at_level(logging.INFO, "manta.stats"):
        for tokens in (100, 600):
            recorder.set("vllm:generation_tokens_total", tokens)
            line.record(figures_of(recorder.series()))
    found = [record.getMessage().split("generation ")[1].split(";")[0] for record in caplog.records]
    assert found == ["10.0 tokens/s", "100.0 tokens/s"]
