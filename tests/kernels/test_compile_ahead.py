"""Kernels are compiled in threads and not run; those that cannot be compiled fail when they are launched."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import build
from triton.runtime.jit import JITFunction

from app.kernels import compile_ahead
from app.kernels.compile_ahead import _count, _is_loaded, _Kernel, _modules_of_their_own, _submitted, _threads
from tests.limits import patience_s
from tests.test_architecture import ROOT


def test_launches_only_compile_within_the_block(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_ahead_without_gpu"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


class Runtime:
    """torch.cuda, where the calling thread works on the second GPU."""

    def __init__(self) -> None:
        self.entered = list[torch.device]()

    def current_device(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        if device.index is None:
            raise ValueError
        self.entered.append(device)


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr("app.kernels.compile_ahead.platform_of", lambda _: SimpleNamespace(runtime=runtime))
    for name in ("cuda", "cuda:0"):
        with _threads(torch.device(name), 1) as pool:
            assert _is_loaded(_submitted(pool, kernel_that(lambda: SimpleNamespace(run=None))))
    assert {device.index for device in runtime.entered} == {1, 0}


def kernel_that(make: Callable[[], Any]) -> _Kernel:
    """One that is made so."""
    return _Kernel({}, 0, make)


def test_what_another_rank_compiles_is_left_for_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked, locks = list[int](), list[bool](), compile_ahead._locks
    goes_on, other = threading.Event(), os.open(tmp_path, os.O_RDONLY)

    def make() -> Any:
        made.append(len(made))
        goes_on.set()
        return SimpleNamespace(run=None)

    def ask(handle: int) -> bool:
        asked.append(locks(handle))
        if len(asked) > 2:  # once by the first, and again by the one that waits
            goes_on.set()
        return asked[-1]

    monkeypatch.setattr(compile_ahead, "_locks", ask)
    kernel = replace(kernel_that(make), folder=lambda: str(tmp_path))
    fcntl.flock(other, fcntl.LOCK_EX)
    assert not kernel.load()
    with ThreadPoolExecutor(1) as pool:
        waits = _submitted(pool, replace(kernel, wait_s=patience_s(60)))
        assert goes_on.wait(patience_s(60))
        made_before = list(made)
        os.close(other)  # the other rank is done
        assert _is_loaded(waits)
    assert made_before == []
    assert kernel.load()
    assert made == [0, 1]


def test_a_folder_that_is_gone_holds_no_kernel_up(tmp_path: Path) -> None:
    """As a cache's is that somebody empties meanwhile."""
    made = list[bool]()

    def make() -> Any:
        made.append(True)
        return SimpleNamespace(run=None)

    assert replace(kernel_that(make), folder=lambda: str(tmp_path / "gone")).load()
    assert made == [True]


def test_a_rank_that_hangs_holds_no_other_up(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    kernel = kernel_that(lambda: SimpleNamespace(run=None))
    assert replace(kernel, folder=lambda: str(tmp_path), wait_s=0.01).load()
    os.close(other)


def test_an_interrupt_while_the_end_waits_drops_what_no_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    made, submitted, dropped = list[int](), list[Future[bool]](), threading.Event()

    def make(_: Any, key: int, *__: Any) -> Any:
        made.append(key)
        dropped.wait(patience_s(20))  # all of it only where none is dropped
        return SimpleNamespace(run=None)

    def submit(pool: ThreadPoolExecutor, kernel: _Kernel) -> Future[bool]:
        submitted.append(_submitted(pool, kernel))
        return submitted[-1]

    def interrupt(_: Future[bool]) -> bool:
        submitted[-1].add_done_callback(lambda _: dropped.set())
        raise KeyboardInterrupt

    for name, value in {"MOST_THREADS": 1, "_submitted": submit, "_is_left": interrupt, "triton_key": str}.items():
        monkeypatch.setattr(compile_ahead, name, value)
    monkeypatch.setattr(JITFunction, "_do_compile", make)
    function: Any = SimpleNamespace(cache_key="", device_caches={0: ({},)})

    def launch_three() -> None:
        with compile_ahead.compile_ahead(torch.device("cpu")):
            for number in range(3):
                JITFunction._do_compile(function, number, None, 0)

    with pytest.raises(KeyboardInterrupt):
        launch_three()
    assert JITFunction._do_compile is make
    assert [future.cancelled() for future in submitted[1:]] == [True, True]
    assert made in ([], [0])


def test_an_interrupt_while_another_rank_is_waited_for_ends_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, made, waits = list[int](), list[int](), threading.Event()

    def refuse(handle: int) -> bool:
        asked.append(handle)
        if len(asked) > 1:  # the first one does not wait
            waits.set()
        return False

    def interrupt(_: Future[bool]) -> bool:
        assert waits.wait(patience_s(60))
        raise KeyboardInterrupt

    def make(_: Any, key: int, *__: Any) -> Any:
        made.append(key)
        return SimpleNamespace(run=None)

    replaced = {"_locks": refuse, "_is_loaded": interrupt, "_folder": lambda *_: str(tmp_path), "triton_key": str}
    for name, value in replaced.items():
        monkeypatch.setattr(compile_ahead, name, value)
    monkeypatch.setattr(compile_ahead, "WAIT_S", patience_s(60))
    monkeypatch.setattr(JITFunction, "_do_compile", make)
    function: Any = SimpleNamespace(cache_key="", device_caches={0: ({},)})
    with pytest.raises(KeyboardInterrupt), compile_ahead.compile_ahead(torch.device("cpu"), ranks=2):
        JITFunction._do_compile(function, 0, None, 0)
    assert made == []


def test_without_threads_kernels_are_only_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with _threads(torch.device("cpu"), 1) as pool:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        loaded = [_submitted(pool, kernel_that(lambda: SimpleNamespace(run=None))) for _ in range(3)]
        monkeypatch.undo()
        assert not any(_is_loaded(kernel) for kernel in loaded)


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_NOARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "__launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___launcher(void) {{ return PyModule_Create(&definition); }}
"""


def _launcher(number: int, folder: Path) -> str:
    """Path of a module as Triton 3.6 makes one for each signature: all have the same name."""
    source, library = folder / f"{number}.c", folder / f"{number}.so"
    source.write_text(LAUNCHER.format(number=number))
    include = sysconfig.get_paths()["include"]
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{include}", "-o", str(library), str(source)], check=True)
    return str(library)


@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs a C compiler and Python's headers",
)
def test_a_module_keeps_its_launcher_while_others_are_loaded(tmp_path: Path) -> None:
    paths = [_launcher(number, tmp_path) for number in range(2)]

    def load(path: str) -> ModuleType:
        return build._load_module_from_path("__launcher", path)

    loaded = [load(path) for path in paths]
    again = load(paths[0])  # a second kernel of the first one's signature
    assert [loaded[1].launch(), again.launch()] == [0, 0], "Python keeps them apart: this care is not needed any more"
    with _modules_of_their_own():
        loaded = [load(path) for path in (*paths, paths[0])]
    assert [module.launch() for module in loaded] == [0, 1, 0]


@pytest.mark.parametrize(
    ("processes", "cores", "ranks", "threads"),
    [(True, 64, 1, 16), (False, 64, 1, 8), (True, 64, 2, 8), (True, 128, 8, 8), (True, 16, 8, 2), (True, 2, 4, 1)],
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, processes: bool, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(compile_ahead.compile_processes, "are_there", lambda: processes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert _count(ranks) == threads
