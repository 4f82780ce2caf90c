"""Triton kernels compiled side by side, before anyone needs them.

A kernel is compiled when it is first launched, and a launch waits for it: a start that meets some sixty kernels one
after another takes some sixty times 0.3 s. Inside `compile_ahead` launches only say which kernels there will be, and
threads compile those, or read them from disk, meanwhile. Nearly all of a compilation is native code that lets other
Python threads run; where processes could be had (compile_processes.py), they do what is to be compiled. Of several
ranks of a host one compiles a kernel, and the others take it from disk.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import sha256
from types import ModuleType
from typing import Any

import torch
from triton.runtime import build, driver
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.jit import JITFunction, get_cache_invalidating_env_vars

from app.kernels import compile_processes
from app.platforms import platform_of

logger = logging.getLogger("manta.kernels")

# What of a compilation is Python waits for the other threads': more of them only wait.
MOST_THREADS = 8
MOST_PROCESSES = 16  # each with a thread that only waits for it
WAIT_S = 120  # for a kernel that another rank has begun: then it is compiled here, too
ASK_S = 0.005  # how often it is asked for
SWITCH_S = 0.0005  # how long one that came back from native code waits for another's Python
_own = threading.local()  # a thread's compiler
_one_at_a_time = threading.Lock()  # in a process: Triton's launch is replaced meanwhile


@dataclass(slots=True)
class Ahead:
    """Counts the kernels that were compiled; known when the block has ended."""

    compiled: int = 0  # or read from Triton's cache on disk
    failed: int = 0


@dataclass(slots=True, frozen=True)
class _Kernel:
    """A kernel that is to be compiled."""

    table: dict[Any, Any]  # Triton's, of the function's kernels
    key: Any
    make: Callable[[], Any]
    source: Callable[[], bytes | None] = lambda: None  # for a process that compiles it onto the disk
    folder: Callable[[], str | None] = lambda: None  # that it is to lie in there, where other ranks may make it, too
    wait_s: float = 0.0  # for one of them that is at it
    given_up: threading.Event = field(default_factory=threading.Event)  # then nobody waits any more

    def load(self) -> bool:
        """Does what the first launch would do: Triton 3.6 compiles a launcher too, by the C compiler. False: another
        rank is at it, and nothing was done."""
        if self.key in self.table:  # another thread was faster
            return True
        with _claimed(self.folder(), self.wait_s, self.given_up) as is_ours:
            is_made = is_ours or (self.wait_s > 0 and not self.given_up.is_set())
            if is_made:
                self._load()
            return is_made

    def _load(self) -> None:
        if (source := self.source()) is not None and (compiler := _compiler()) is not None:
            with suppress(OSError):
                compiler.compile(source)
        kernel = self.make()
        assert kernel is not None, "a hook of Triton's compiles it elsewhere"
        _ = kernel.run


@contextmanager
def compile_ahead(device: torch.device, ranks: int = 1) -> Iterator[Ahead]:
    """Within the block, this thread's launches run nothing: what they would have written stays as it was, mostly
    uninitialised. A pool of threads compiles their kernels for `device` and loads them; the block's end waits for it.
    Each of `ranks` does so, and they share the host's cores; what one of them has begun the others leave for last.

    Raises what the block raises, and an interrupt while its end waits, without those kernels that no thread had begun;
    one that cannot be compiled or loaded
    is only counted. Launches of other threads are what they always are. In Triton's interpreter nothing is changed.
    """
    ahead, kernels, known = Ahead(), dict[tuple[int, Any], tuple[_Kernel, Future[bool]]](), set[Any]()
    given_up = threading.Event()
    me, run, make = threading.get_ident(), JITFunction.run, JITFunction._do_compile

    def run_nothing(function: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        if threading.get_ident() != me:
            return run(function, *arguments, grid=grid, warmup=warmup, **keywords)
        alike = _alike(function, arguments, keywords)
        if alike not in known:  # Triton knows none of them before its thread is done, and would describe each anew
            run(function, *arguments, grid=grid, warmup=True, **keywords)
            known.add(alike)
        return None

    def make_later(function: Any, key: Any, *details: Any, **keywords: Any) -> Any:
        if threading.get_ident() != me:
            return make(function, key, *details, **keywords)
        # Here, and not in several threads at once: it fills tables that launches read.
        _ = function.cache_key
        table = function.device_caches[_device_of(*details, **keywords)][0]
        kernel = _Kernel(
            *(table, key, lambda: make(function, key, *details, **keywords)),
            lambda: _source(function, *details, **keywords),
            lambda: _folder(function, *details, **keywords) if ranks > 1 else None,
            given_up=given_up,
        )
        if (id(table), key) not in kernels:
            kernels[id(table), key] = kernel, _submitted(pool, kernel)
        return kernel  # not in Triton's table: other threads read it

    with _one_at_a_time, _threads(device, ranks) as pool:
        JITFunction.run, JITFunction._do_compile = run_nothing, make_later
        try:
            yield ahead
            left = [kernel for kernel, done in kernels.values() if _is_left(done)]
            again = [_submitted(pool, replace(kernel, wait_s=WAIT_S)) for kernel in left]
            ahead.compiled = sum(map(_is_loaded, [*(done for _, done in kernels.values()), *again]))
            ahead.failed = len(kernels) - ahead.compiled
        except BaseException:
            given_up.set()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            JITFunction.run, JITFunction._do_compile = run, make
            compile_processes.end()


def _submitted(pool: ThreadPoolExecutor, kernel: _Kernel) -> Future[bool]:
    try:
        return pool.submit(kernel.load)
    except RuntimeError as error:  # no thread to be had
        failed = Future[bool]()
        failed.set_exception(error)
        return failed


def _is_left(kernel: Future[bool]) -> bool:
    """Waits for it; true if another rank was at it."""
    return kernel.exception() is None and not kernel.result()


def _is_loaded(kernel: Future[bool]) -> bool:
    """Waits for it. One that fails here fails again at its launch."""
    if (error := kernel.exception()) is not None:
        logger.debug("a kernel was not compiled ahead", exc_info=error)
    return error is None and kernel.result()


@contextmanager
def _claimed(folder: str | None, wait_s: float, given_up: threading.Event) -> Iterator[bool]:
    """Within the block no other rank makes what will lie in the folder; false: one does, for longer than `wait_s` or
    until it was given up."""
    if folder is None:
        yield True
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # a cache that somebody emptied meanwhile, or may not read: each rank makes its own
        yield True
        return
    try:
        end_s = time.monotonic() + wait_s
        while not (is_ours := _locks(handle)) and time.monotonic() < end_s and not given_up.wait(ASK_S):
            continue
        yield is_ours
    finally:
        os.close(handle)  # with which the lock goes


def _locks(handle: int) -> bool:
    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks
        return True
    return True


def _alike(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Equal for launches of one kernel."""
    *_, bind = function.device_caches[driver.active.get_current_device()]
    _, kinds, options = bind(*arguments, **keywords, debug=False, instrumentation_mode="")
    return id(function), tuple(kinds), str(options)


@contextmanager
def _threads(device: torch.device, ranks: int) -> Iterator[ThreadPoolExecutor]:
    """Those that compile."""
    threads, switch = _count(ranks), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with (
            _modules_of_their_own(),
            ThreadPoolExecutor(threads, "compile", _enter, (_indexed(device), threading.Lock())) as pool,
        ):
            yield pool
    finally:
        sys.setswitchinterval(switch)


def _count(ranks: int) -> int:
    """Threads of one of `ranks`: a process for each takes some 200 MB, so of several ranks none has more than it would
    have without processes."""
    most = MOST_PROCESSES if ranks == 1 and compile_processes.are_there() else MOST_THREADS
    return max(1, min(most, len(os.sched_getaffinity(0)) // ranks))


@contextmanager
def _modules_of_their_own() -> Iterator[None]:
    """Triton 3.6 loads each launcher as a module of one and the same name. When Python loads such a file once more, it
    writes what is in it into the module of that name that came last: which may be the one from which another thread is
    about to take its launcher. So here each loads alone and gets a copy."""
    load, one_at_a_time = build._load_module_from_path, threading.Lock()

    def load_alone(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with one_at_a_time:
            own.__dict__.update(load(name, path).__dict__)
        return own

    build._load_module_from_path = load_alone
    try:
        yield
    finally:
        build._load_module_from_path = load


def _indexed(device: torch.device) -> torch.device:
    """A device without an index is this thread's current one; in other threads it would be another."""
    runtime = platform_of(device).runtime
    has_one = runtime is None or device.index is not None
    return device if has_one else torch.device(device.type, runtime.current_device())


def _enter(device: torch.device, one_at_a_time: threading.Lock) -> None:
    if (runtime := platform_of(device).runtime) is not None:
        runtime.set_device(device)
    with one_at_a_time:  # the first reads the whole of Triton, 400 MB, for the keys of its cache
        triton_key()


def _compiler() -> compile_processes.Compiler | None:
    """Returns this thread's own, if there are any."""
    if not hasattr(_own, "compiler"):
        _own.compiler = compile_processes.new_compiler()
    found: compile_processes.Compiler | None = _own.compiler
    return found


def _source(function: Any, signature: Any, device: Any, *details: Any, **_: Any) -> bytes | None:
    """Returns what another process compiles it from, if one can and it is not on disk."""
    if not compile_processes.are_there() or _folder(function, signature, device, *details) is None:
        return None
    try:
        (constants, options, attributes), target = details[:3], function.device_caches[device][2]
        return compile_processes.described(function, target, signature, constants, options, attributes)
    except Exception:  # of pickle's, for which there is no common one
        return None


def _folder(function: Any, signature: Any, device: Any, *details: Any, **_: Any) -> str | None:
    """Returns where it is to lie on disk; None: it does already, or nobody can tell."""
    try:
        (constants, options, attributes), backend = details[:3], function.device_caches[device][3]
        source = function.ASTSource(function, signature, constants, attributes)
        key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
        kept: Any = get_cache_manager(sha256(key.encode()).hexdigest())
        return None if kept.get_group(f"{source.name[:150]}.json") else kept.cache_dir
    except Exception:  # of whichever compiler and cache there are
        return None


def _device_of(signature: Any, device: Any, *_: Any, **__: Any) -> Any:
    """Triton's number of the device, among the arguments of JITFunction._do_compile after the key."""
    return device
