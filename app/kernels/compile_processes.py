"""Processes that compile kernels into Triton's cache on disk, from where the threads of `compile_ahead` take them.

A good part of a compilation is Python, which the threads of one process do in turn, beside a start's launches. These
are forked of a process that has imported all they need and has no device yet; so they begin at once, and cost nothing
where there is nothing to compile.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S = 120  # of a kernel; the slowest take some 4 s. Who has waited so long compiles it itself
_LENGTH = struct.Struct("<Q")
_control: tuple[socket.socket, int] | None = None  # to the process that the others are forked of, and its number


def prepare() -> None:
    """Import what they need, for a process that is forked itself before it may `begin`."""
    if _has_gpu():
        from triton.runtime.cache import triton_key

        triton_key()  # which reads all of Triton, 400 MB, and is kept


def begin() -> None:
    """Fork the process that the others are forked of. Where this one has further threads, no GPU or one in use already,
    none is."""
    global _control
    if _control is not None or threading.active_count() > 1 or not _has_gpu() or _is_in_use():
        return
    ours, theirs = socket.socketpair()
    if (number := os.fork()) == 0:
        try:
            _let_go_of_files(theirs.fileno())
            _fork_compilers(theirs)
        finally:
            os._exit(0)
    theirs.close()
    _control = ours, number


def end() -> None:
    """They end, if there are any."""
    global _control
    if _control is not None:
        control, number = _control
        _control = None
        control.close()
        with suppress(ChildProcessError):
            os.waitpid(number, 0)


def are_there() -> bool:
    """True between `begin` and `end`, where they could be had."""
    return _control is not None


class Compiler:
    """One of them, for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(LIMIT_S)
        self._connection = connection

    def compile(self, source: bytes) -> None:
        """Return once it has compiled what `described` gave, or could not. OSError where it is gone, or hangs: then at
        once from there on."""
        try:
            self._connection.sendall(_LENGTH.pack(len(source)) + source)
            if not self._connection.recv(1):
                raise ConnectionError
        except OSError:
            self._connection.close()
            raise


def new_compiler() -> Compiler | None:
    """One more, if there are any."""
    if _control is None:
        return None
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(_control[0], [b"1"], [theirs.fileno()])
        except OSError:
            ours.close()
            return None
    return Compiler(ours)


def described(function: Any, target: Any, signature: Any, constants: Any, options: Any, attributes: Any) -> bytes:
    """Returns what another process compiles a kernel from. ValueError where it would not find the kernel by its name,
    and what pickle raises where it cannot be told."""
    named = {key: _Named(value) if hasattr(value, "cache_key") else value for key, value in constants.items()}
    kind = function.ASTSource
    told = {key: value for key, value in options.__dict__.items() if key != "extern_libs"}
    return pickle.dumps((kind.__module__, kind.__name__, _Named(function), target, signature, named, told, attributes))


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _is_in_use() -> bool:
    import torch  # not before a process is to have a device

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Named:
    """A function of Triton's by its name, with its key. Triton's keys depend on which functions that it calls had one
    before it (3.6, 3.7: `DependenciesFinder._update_hash`), so another process would find other ones, and what it
    compiles would lie where nobody looks."""

    def __init__(self, function: Any) -> None:
        self.module, self.name = function.fn.__module__, function.fn.__qualname__
        if self.module == "__main__" or self.found() is not function:
            raise ValueError(self.name)
        self.key = function.cache_key

    def found(self) -> Any:
        """That function."""
        found = getattr(importlib.import_module(self.module), self.name, None)
        return getattr(found, "function", found)

    def taken_on(self) -> Any:
        """That function, in another process."""
        function = self.found()
        function.hash = self.key
        return function


def _let_go_of_files(but: int) -> None:
    """Hold no file of the forking process', so that a socket or a lock that it closes is free. Their numbers stay
    taken, as objects of Python know them still."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (but, nothing):
            os.dup2(nothing, number)


def _fork_compilers(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prepare()
    while True:
        data, files, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        connection = socket.socket(fileno=files[0])
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(connection)
            return
        connection.close()


def _serve(connection: socket.socket) -> None:
    file = connection.makefile("rb")
    while head := file.read(_LENGTH.size):
        signal.alarm(LIMIT_S)  # which ends this process
        with suppress(Exception):  # the thread that asked meets it again
            _compile(file.read(*_LENGTH.unpack(head)))
        signal.alarm(0)
        connection.sendall(b"1")


def _compile(source: bytes) -> None:
    from triton.compiler import compile as compile_kernel

    module, kind, function, target, signature, constants, options, attributes = pickle.loads(source)
    found = {key: value.taken_on() if isinstance(value, _Named) else value for key, value in constants.items()}
    make = getattr(sys.modules.get(module) or importlib.import_module(module), kind)
    compile_kernel(make(function.taken_on(), signature, found, attributes), target=target, options=options)
