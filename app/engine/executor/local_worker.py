"""`python -m app.engine.executor.local_worker`: one rank as a child process; standard input says which."""

from __future__ import annotations

import pickle
import signal
import sys

from app.config.engine import EngineConfig
from app.engine.executor.spawner import end_with_the_parent
from app.engine.executor.worker_group.rendezvous import Address
from app.engine.executor.worker_group.worker_actor import WorkerActor, WorkerPlace


def serve(address: Address, worker_class: str, config: EngineConfig, place: WorkerPlace) -> None:
    """Serve the driver's calls, then its steps, until it says so or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the driver decides
    worker = WorkerActor(worker_class, config, place, in_ray=False)
    worker.connect(address, True)
    worker.serve_calls()


if __name__ == "__main__":
    end_with_the_parent()
    serve(*pickle.load(sys.stdin.buffer))
