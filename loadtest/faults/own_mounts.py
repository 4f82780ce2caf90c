"""`python -m loadtest.faults.own_mounts FILE`: `serve run FILE` with mounts of its own and a small disk for Ray."""

from __future__ import annotations

import os
import shlex
import sys

DISK_MIB = 128


def main() -> None:
    """Becomes `serve run`."""
    directory = shlex.quote(os.environ["RAY_TMPDIR"])
    serve = shlex.join([sys.executable, "-m", "ray.serve.scripts", "run", sys.argv[1]])
    script = f"mkdir -p {directory} && mount -t tmpfs -o size={DISK_MIB}m none {directory} && exec {serve}"
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script])


if __name__ == "__main__":
    main()
