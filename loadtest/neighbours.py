"""The wait of a tenant beside another one's heaviest loads: its chats, one after the other, with and without them.

    python -m loadtest.neighbours [LOAD ...] [--rounds 3] [--most-s 0.5] [--url URL] [--out results/neighbours.json]

Starts a server of its own (quickstart.yaml, two keys), or asks the one at --url, which wants the same two keys. Each
round has the chats of a quiet time, then those beside the load. The chats come from a process of their own, each over a
connection of its own, as a user's behind a balancer. Ends with status 1 where a chat failed, or took longer than
--most-s: a figure of a calm machine, so its load stands beside it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve_process import ROOT, ServeProcess
from loadtest.hostile_loads import CHAT, LOADS, Tenant

CONFIG = ROOT / "configs/serve/quickstart.yaml"
KEYS = {"heavy": "a-key-of-the-heavy-tenant", "neighbour": "a-key-of-its-neighbour"}
PAUSE_S = 0.05  # between two chats
QUIET_S = 4.0
SETTLE_S = 2.0  # after a load, for what it left under way
CHAT_S = 120.0


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat of the neighbour; times are of the machine's monotonic clock."""

    began_s: float
    took_s: float
    status: int


@dataclass(slots=True)
class Waits:
    """Chats of one phase."""

    chats: list[Chat] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Their number, the median and the slowest in seconds, and how many were not answered well."""
        took = [chat.took_s for chat in self.chats]
        return {
            "chats": len(took),
            "median_s": statistics.median(took) if took else None,
            "slowest_s": max(took, default=None),
            "failed": sum(chat.status != 200 for chat in self.chats),
        }


def chat_on(base_url: str, key: str, asked: Connection) -> None:
    """The neighbour's process: chats until it is told to end, then it sends them all."""
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    content, chats = json.dumps(body).encode(), []
    while not asked.poll(PAUSE_S):
        began_s = time.monotonic()
        status = _post(base_url, key, content)
        chats.append(Chat(began_s, time.monotonic() - began_s, status))
    asked.send(chats)


def _post(base_url: str, key: str, content: bytes) -> int:
    connection = http.client.HTTPConnection(str(urlsplit(base_url).netloc), timeout=CHAT_S)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", CHAT, content, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def beside(base_url: str, work: Callable[[], Any]) -> tuple[Any, Waits]:
    """The result of `work`, and the neighbour's chats from its begin to its end."""
    ours, its = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=chat_on, args=(base_url, KEYS["neighbour"], its), daemon=True)
    process.start()
    time.sleep(SETTLE_S)  # Python starts
    began_s = time.monotonic()
    try:
        result = work()
    finally:
        ended_s = time.monotonic()
        ours.send(None)
        chats: list[Chat] = ours.recv()
        process.join()
    return result, Waits([chat for chat in chats if chat.began_s + chat.took_s > began_s and chat.began_s < ended_s])


def measure(base_url: str, name: str, rounds: int) -> dict[str, Any]:
    """One load's row."""
    tenant = Tenant(base_url, KEYS["heavy"])
    quiet, busy, statuses, took, load = Waits(), Waits(), Counter[str](), [], []
    for _ in range(rounds):
        load.append(os.getloadavg()[0])
        _, waits = beside(base_url, lambda: time.sleep(QUIET_S))
        quiet.chats += waits.chats
        began_s = time.monotonic()
        found, waits = beside(base_url, lambda: LOADS[name](tenant))
        took.append(time.monotonic() - began_s - SETTLE_S)
        busy.chats += waits.chats
        statuses += found
        time.sleep(SETTLE_S)
    return {
        "load": name, "quiet": quiet.as_json(), "beside": busy.as_json(), "answers": dict(statuses),
        "load_took_s": statistics.median(took), "machine_load": load, "waits": [asdict(chat) for chat in busy.chats],
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| load | answers | took, s | quiet: median / slowest, s | beside it: chats, median / slowest, s | failed "
        "| machine's load |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        quiet, busy = row["quiet"], row["beside"]
        answers = ", ".join(f"{status}: {number}" for status, number in sorted(row["answers"].items()))
        loads = "; ".join(f"{load:.1f}" for load in row["machine_load"])
        lines.append(
            f"| {row['load']} | {answers} | {row['load_took_s']:.1f} "
            f"| {quiet['median_s']:.3f} / {quiet['slowest_s']:.3f} "
            f"| {busy['chats']}, {busy['median_s']:.3f} / {busy['slowest_s']:.3f} | {busy['failed']} | {loads} |"
        )
    return "\n".join(lines)


def faults(rows: Sequence[dict[str, Any]], most_s: float) -> list[str]:
    """Sentences on the chats that failed or took too long."""
    found = []
    for row in rows:
        busy = row["beside"]
        if busy["failed"]:
            found.append(f"{row['load']}: {busy['failed']} chats of the neighbour failed")
        if busy["slowest_s"] > most_s:
            found.append(f"{row['load']}: a chat of the neighbour took {busy['slowest_s']:.2f} s")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", metavar="LOAD", help=f"of {', '.join(LOADS)}; all when none is given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-s", type=float, default=0.5, help="longest that a chat may take")
    parser.add_argument("--url", help="a running server with the keys of KEYS, instead of one of its own")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if unknown := set(options.loads) - set(LOADS):
        parser.error(f"unknown loads {sorted(unknown)}; there are {', '.join(LOADS)}")
    with ExitStack() as stack:
        url = options.url or stack.enter_context(serving()).base_url
        _post(url, KEYS["neighbour"], b"{}")
        rows = []
        for name in options.loads or LOADS:
            rows.append(measure(url, name, options.rounds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    found = faults(rows, options.most_s)
    print(*found, sep="\n")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"cores": len(os.sched_getaffinity(0)), "rows": rows, "faults": found}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(found))


def serving() -> ServeProcess:
    """A server that knows both tenants."""
    keys = " ".join(f"{tenant}={key}" for tenant, key in KEYS.items())
    return ServeProcess(CONFIG, ready_timeout_s=400, environ={"MANTA_API_KEYS": keys})


if __name__ == "__main__":
    sys.exit(main())
