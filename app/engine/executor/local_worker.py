"""`python -m app.engine.executor.local_worker`: one rank as a child process; standard input says which."""

from __future__ import annotations

import ctypes
import pickle
import signal
import sys

from app.config import EngineConfig
from app.engine.executor.transports.rendezvous import Address
from app.engine.executor.worker_actor import Place, WorkerActor

PR_SET_PDEATHSIG = 1  # prctl(2)


def serve(address: Address, worker_class: str, config: EngineConfig, place: Place) -> None:
    """Serve the driver's calls, then its steps, until it says so or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the driver decides
    worker = WorkerActor(worker_class, config, place, in_ray=False)
    worker.connect(address, True)
    worker.serve_calls()


def end_with_the_driver() -> None:
    """Have the kernel kill this process when the thread that made it ends, even while this one is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    end_with_the_driver()
    serve(*pickle.load(sys.stdin.buffer))
