"""Locust itself against a server with known timings: rows, failures, and what each kind of user sends."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_process import ROOT, free_port
from loadtest.record import AnswerRecord
from tests import limits
from tests.loadtest.conftest import GAP_S, NUM_CHUNKS, NUM_TOKENS, TTFT_S, ScriptedServer

E2E_S = TTFT_S + (NUM_CHUNKS - 1) * GAP_S


def _locust(server: ScriptedServer, out: Path, *options: str, file: str = "locustfile") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "locust", "--headless", "--only-summary", "-f", f"loadtest/{file}.py",
         "--host", server.url, "--json-file", str(out / "run"), "--records", str(out / "records.jsonl"),
         "--spawn-rate", "100", "--stop-timeout", "10", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=limits.patience_s(), check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def _rows(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["method"], row["name"]): row for row in json.loads((out / "run.json").read_text())}


def _records(out: Path) -> list[AnswerRecord]:
    return [AnswerRecord.from_json(line) for line in (out / "records.jsonl").read_text().splitlines()]


def test_rows_have_the_servers_times(scripted: ScriptedServer, tmp_path: Path) -> None:
    status, log = _locust(
        scripted,
        tmp_path,
        "--users",
        "3",
        "--run-time",
        "4s",
        "--api-key",
        "sk-1",
        "--csv",
        str(tmp_path / "run"),
        "ChatUser",
    )
    assert status == 0, log
    rows, records = _rows(tmp_path), _records(tmp_path)
    assert set(rows) == {("POST", "chat"), ("TTFT", "chat"), ("ITL", "chat"), ("E2E", "chat")}
    count = len(scripted.bodies)
    assert count >= 6
    assert len(records) == count  # nothing was lost at the end of the run
    samples = {"TTFT": count, "ITL": (NUM_CHUNKS - 1) * count, "E2E": count}
    assert {metric: rows[metric, "chat"]["num_requests"] for metric in samples} == samples
    total_s = {metric: rows[metric, "chat"]["total_response_time"] / 1e3 for metric in samples}
    assert total_s["TTFT"] >= TTFT_S * count
    assert total_s["E2E"] >= E2E_S * count
    assert total_s["TTFT"] + total_s["ITL"] == pytest.approx(total_s["E2E"], rel=0.1)
    assert rows["POST", "chat"]["num_requests"] == count
    assert rows["POST", "chat"]["min_response_time"] >= 1e3 * E2E_S
    with (tmp_path / "run_stats.csv").open() as file:  # as of the last second
        csv_rows = {row["Type"]: row for row in csv.DictReader(file)}
    assert set(csv_rows) == {"POST", "TTFT", "ITL", "E2E", ""}
    aggregated = csv_rows[""]
    assert aggregated["Request Count"] == csv_rows["POST"]["Request Count"]  # requests, not the rows of the metrics
    assert {record.num_output_tokens for record in records} == {NUM_TOKENS}
    assert scripted.authorizations == {"Bearer sk-1"}
    assert {body["model"] for body in scripted.bodies} == {"scripted"}  # as /v1/models says
    assert len({str(body["messages"]) for body in scripted.bodies}) > 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("cut", "Incomplete response"),
        ("error", "error in the stream: the engine died"),
        ("status", "status 503"),
    ],
)
def test_broken_answers_are_failures(scripted: ScriptedServer, tmp_path: Path, model: str, message: str) -> None:
    status, log = _locust(scripted, tmp_path, "--users", "1", "--run-time", "1s", "--model", model, "ChatUser")
    assert status == 1, log
    rows = _rows(tmp_path)
    assert set(rows) == {("POST", "chat")}
    assert rows["POST", "chat"]["num_failures"] == rows["POST", "chat"]["num_requests"] > 0
    assert all(message in (record.error or "") for record in _records(tmp_path))


def test_what_the_kinds_send(scripted: ScriptedServer, tmp_path: Path) -> None:
    options = ["--users", "8", "--run-time", "5s", "--turns", "2", "--burst", "4", "--prompt-words", "100"]
    kinds = ["SharedPrefixUser", "LongPromptUser", "MultiTurnUser", "BurstyUser"]
    status, log = _locust(scripted, tmp_path, *options, "--max-tokens", "17", "--ignore-eos", *kinds)
    assert status == 0, log
    assert {record.kind for record in _records(tmp_path)} == {"shared-prefix", "long-prompt", "multi-turn", "bursty"}
    assert all(body["max_tokens"] == 17 and body["ignore_eos"] is True for body in scripted.bodies)
    systems = [body["messages"][0]["content"] for body in scripted.bodies if body["messages"][0]["role"] == "system"]
    assert len(set(systems)) <= 4 < len(systems)
    long_prompts = [
        b["messages"][0]["content"] for b in scripted.bodies if "The code of" in b["messages"][0]["content"]
    ]
    assert long_prompts
    assert all(len(prompt.split()) >= 100 for prompt in long_prompts)
    assert len({prompt[:30] for prompt in long_prompts}) > 1
    lengths = {len(body["messages"]) for body in scripted.bodies if body["messages"][0]["role"] == "user"}
    assert lengths == {1, 3}  # two turns a conversation
    answers = {body["messages"][1]["content"] for body in scripted.bodies if len(body["messages"]) == 3}
    assert answers == {"".join(f"w{i} " for i in range(NUM_CHUNKS))}  # the history is what the server said
    bursts = sorted(record.begin for record in _records(tmp_path) if record.kind == "bursty")
    assert len(bursts) % 4 == 0
    assert all(bursts[i + 3] - bursts[i] < limits.scaled_s(0.2) for i in range(0, len(bursts), 4))


def test_open_loop_does_not_wait(scripted: ScriptedServer, tmp_path: Path) -> None:
    options = ["--users", "1", "--rate", "20", "--run-time", "4s", "--prompt-words", "20"]
    status, log = _locust(scripted, tmp_path, *options, file="open_loop")
    assert status == 0, log
    records = _records(tmp_path)
    assert len(records) == len(scripted.bodies)  # also those that were running at the end
    assert 20 <= len(records) <= 140  # 80 are expected, fewer of a machine that is late; a closed loop would send 10
    begins = sorted(record.begin for record in records)
    gaps = [later - earlier for earlier, later in pairwise(begins)]
    assert min(gaps) < E2E_S / 4  # a closed loop of one user would wait E2E_S
    assert max(gaps) > 2 * sum(gaps) / len(gaps)  # and a regular one would not vary


def test_rows_reach_the_master_from_worker_processes(scripted: ScriptedServer, tmp_path: Path) -> None:
    port = str(free_port())
    options = ["--processes", "2", "--master-bind-port", port, "--master-port", port, "--expect-workers", "2"]
    status, log = _locust(scripted, tmp_path, *options, "--users", "4", "--run-time", "3s", "--records", "", "ChatUser")
    assert status == 0, log
    rows = _rows(tmp_path)
    assert rows["TTFT", "chat"]["num_requests"] == rows["POST", "chat"]["num_requests"] > 0


def test_rows_and_options_are_on_the_web_page(scripted: ScriptedServer) -> None:
    port = free_port()
    page = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--host", scripted.url, "--autostart",
         "--web-host", "127.0.0.1", "--web-port", str(port), "--users", "2", "--api-key", "sk-secret", "ChatUser"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        limit = limits.Limit(30.0)
        rows: set[tuple[str, str]] = set()
        while len(rows) < 5 and limit.left_s():
            limits.pause(0.1)
            with contextlib.suppress(OSError):
                stats = json.load(urllib.request.urlopen(f"{page}/stats/requests"))["stats"]
                rows = {(row["method"], row["name"]) for row in stats}
        assert rows == {("POST", "chat"), ("TTFT", "chat"), ("ITL", "chat"), ("E2E", "chat"), ("", "Aggregated")}
        html = urllib.request.urlopen(page).read().decode()
        assert "ignore_eos" in html
    finally:
        process.terminate()
        process.wait(limits.patience_s())
