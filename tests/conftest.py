"""Set-up that every test shares: no network, few threads, GPU tests only where there is a GPU."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest
import pytest_timeout

from tests import limits
from tests.outcomes import outcomes_of
from tests.parts import PARTS, Stopwatch, measured, parts, suites

ROOT = Path(__file__).resolve().parent.parent

# Registered before Ray and all else that wants to run at the end, so run last.
_end: dict[str, Any] = {"process": os.getpid(), "session": None, "crashed": False}


@atexit.register
def _leave_with_the_verdict() -> None:
    """Skip the destructors of native libraries: threads that `ray.shutdown` leaves running now and then crash the
    process meanwhile, after all tests have passed. Ray's own processes leave like this too. The price: a crash at exit
    that is our own doing is not seen either."""
    if _end["session"] is not None and _end["process"] == os.getpid():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_end["session"].exitstatus or _end["crashed"])


def _note_crash(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _end["crashed"] = True  # in pytest or a plugin, after the tests' verdict
    sys.__excepthook__(kind, error, traceback)


if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A core for each: threads of two processes that wait for the same cores take many times as long.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"

# Before torch, Ray or transformers are imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # transformers imports Triton, and then it is too late to choose


def pytest_sessionstart(session: pytest.Session) -> None:
    _end["session"] = session
    sys.excepthook = _note_crash


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """pytest-timeout's limits are of a calm machine too: at its end a test gets the time that others took from it."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    limit = limits.Limit(settings.timeout)

    def ring(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if left := limit.left_s():
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit.left_s())
    return True


# What CI need not have: reasons of skips (regular expressions) beside those that it names itself in CI_MAY_SKIP.
_MAY_SKIP = (
    *(r"\bGPU", r"\bLinux", "Gradio is installed", "PUBLISHED_TEMPLATES", "KUBERAY_SCHEMAS"),
    *(r"may open \d+ files", "this processor has no AVX-512"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that is skipped for want of a tool fails: nobody would miss it."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.search(may, reason) for may in (*_MAY_SKIP, os.environ.get("CI_MAY_SKIP")) if may):
            report.outcome, report.longrepr = "failed", f"skipped, where CI=true: {reason}"
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="JSON file for what became of each test")
    parser.addoption("--part", choices=PARTS, help="one part of the suite only (tests/parts.py)")
    parser.addoption("--seconds", type=Path, help="JSON file for the seconds of tests that take long")


_stopwatch = Stopwatch()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _stopwatch.add(report.nodeid, report.when, report.duration)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcomes_of(terminalreporter.stats), indent=1, sort_keys=True) + "\n")
    seconds: Path | None = config.getoption("--seconds")
    if seconds is not None:
        _stopwatch.write(seconds)


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes on one thread: small products take longer on several, and tests run beside others."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of one Ray cluster of 4 CPUs for all tests that need no cluster of their own; this process has joined it,
    and its workers find this repository."""
    import ray

    context = ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}},
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


def pytest_collection_finish() -> None:
    """Sets what was imported aside: a look of the collector at all of it takes a second, hundreds of times a run.

    And no schedule depends on how long steps take, but where a test says so: what is counted of preemptions, or of
    blocks that are found again, is the same on any machine.
    """
    gc.collect()
    gc.freeze()
    if assembly := sys.modules.get("app.engine.assembly"):
        assert "CPU_STEP_S" in vars(assembly), "the usual `max_step_s` of a CPU stands elsewhere"
        vars(assembly)["CPU_STEP_S"] = 0.0


@pytest.hookimpl(trylast=True)  # after -m, so that the quickest of a file is one that runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the asked part of the suite; skip what needs GPUs this machine has not got; tests over the shared Ray
    cluster come last, as one process joins one cluster at a time."""
    if (part := config.getoption("--part")) is not None:
        found = parts([item.nodeid for item in items], measured(), suites().values())
        config.hook.pytest_deselected(items=[item for item in items if found[item.nodeid] != part])
        items[:] = [item for item in items if found[item.nodeid] == part]
    items.sort(key=lambda item: "ray_cluster" in getattr(item, "fixturenames", ()))
    needs = {"gpu": 1, "multi_gpu": 2}
    marked = [(item, count) for item in items for name, count in needs.items() if item.get_closest_marker(name)]
    if not marked:
        return
    available = _gpu_count()
    for item, count in marked:
        if available < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} GPU(s), found {available}"))
