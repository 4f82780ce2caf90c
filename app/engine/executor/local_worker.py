"""`python -m app.engine.executor.local_worker`: one rank as a child process; standard input says which."""

from __future__ import annotations

import pickle
import signal
import sys

from app.engine.executor.worker_actor import WorkerActor


def main() -> None:
    """Serve the driver's calls, then its steps, until it says so or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the driver decides
    address, worker_class, config, place = pickle.load(sys.stdin.buffer)
    worker = WorkerActor(worker_class, config, place, in_ray=False)
    worker.connect(address, True)
    worker.serve_calls()


if __name__ == "__main__":
    main()
