"""Copies of a process that has imported Ray draw ids of their own, and one that would not is known."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from tests.limits import patience_s
from tests.test_architecture import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
BEGIN = """
import os, sys, threading
from app.cli import ray_ids, worker_template as template
"""
COPIES = """
from ray import ObjectRef
from ray._raylet import TaskID, UniqueID, WorkerID
def draw():
    print(*(kind.from_random().hex() for kind in (ObjectRef, UniqueID, WorkerID) for _ in range(2)), flush=True)
sys.stdout.flush()
for _ in range(4):
    if template._fork():
        draw()
        for _ in range(2):
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
        os._exit(0)
    os.wait()
"""
CLUSTER = """
import json, os, sys, threading
import ray
from app.cli import worker_template
from app.cli.quick_ray import quick_ray

class Inner:
    def ping(self):
        return os.getpid()

class Outer:
    def ids(self):
        from ray._private.worker import global_worker
        from ray.util import placement_group
        found = [global_worker.worker_id.hex(), global_worker.current_task_id.hex()]
        def draw():
            self.held = [ray.put([os.getpid(), number]) for number in range(4)]
            assert ray.get(self.held) == [[os.getpid(), number] for number in range(4)]
            actors = [ray.remote(num_cpus=0)(Inner).remote()]
            pings = [actor.ping.remote() for actor in actors]
            groups = [placement_group([{"CPU": 0.01}]) for _ in range(2)]
            ray.get(pings)
            found.extend(each.hex() for each in (*self.held, *pings))
            found.extend(each.id.hex() for each in groups)
            found.extend(each._actor_id.hex() for each in actors)
        draw()
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        with open(f"/proc/{os.getppid()}/maps") as maps:
            is_copy = "_raylet" in maps.read()
        return found, is_copy

with worker_template.running():
    with quick_ray({}, dashboard=False):
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    actors = [ray.remote(num_cpus=0)(Outer).remote() for _ in range(5)]
    print("IDS", json.dumps(ray.get([actor.ids.remote() for actor in actors])))
    ray.shutdown()
"""


def printed(code: str, **more: str) -> str:
    """The output of a new Python."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT | more,
        capture_output=True,
        text=True,
        timeout=patience_s(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_copies_of_what_a_template_imports_draw_ids_of_their_own() -> None:
    words = printed(f"""{BEGIN}
with ray_ids.undrawn():
    template._import(template.RAY_MODULES)
print(ray_ids.are_apart()){COPIES}""").split()
    assert words[0] == "True"
    assert len(words) == len(set(words)) == 1 + 4 * 3 * 6


def test_one_id_drawn_in_a_thread_that_has_ended_is_too_many() -> None:
    words = printed(f"""{BEGIN}
import ray
print(ray_ids.are_apart())
thread = threading.Thread(target=ray.ObjectRef.from_random)
thread.start()
thread.join()
print(ray_ids.are_apart()){COPIES}""").split()
    assert words[:2] == ["True", "False"]
    assert len(set(words)) < len(words), "the judge: they share ids"


def test_without_ray_nothing_is_told_apart() -> None:
    assert printed(f"{BEGIN}print(ray_ids.are_apart())").split() == ["False"]


@pytest.mark.slow
def test_workers_of_a_cluster_have_ids_of_their_own() -> None:
    """Two actors got one placement group, and one process read the array of another, where copies shared ids."""
    folder = tempfile.mkdtemp(prefix="mnt", dir="/tmp")  # short: sockets lie in it
    try:
        lines = printed(CLUSTER, RAY_TMPDIR=folder).splitlines()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (line,) = [line for line in lines if line.startswith("IDS ")]
    found: list[tuple[list[str], bool]] = json.loads(line.removeprefix("IDS "))
    ids = [each for own, _ in found for each in own]
    assert len(ids) == len(set(ids)) == 5 * (2 + 2 * (4 + 1 + 2 + 1))
    assert any(is_copy for _, is_copy in found), "none is a copy of a process with Ray: nothing was shown"
