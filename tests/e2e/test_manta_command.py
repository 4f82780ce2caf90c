"""The command from end to end: a model becomes a configuration, is served, chatted with and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serve_process import ROOT, ServeProcess, free_port
from tests.limits import patience_s

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def manta(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", *map(str, argv)]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience_s(), check=False
    )


def test_serve_chat_bench(tmp_path: Path) -> None:
    file, figures = tmp_path / "mine.yaml", tmp_path / "bench.json"
    options = ["--max-model-len", 1024, "--kv-cache-memory-bytes", 64 << 20, "--port", free_port()]
    done = manta("serve", "tiny-chat", "--name", "mine", *options, "-o", file, "--dry-run")
    assert done.returncode == 0, done.stderr
    with ServeProcess(file, module=("app.cli", "serve")) as server:
        assert f"manta chat --url {server.base_url}" in server.log()
        answer = manta("chat", "--url", server.base_url, "-m", "What is 3 + 4?", "--temperature", 0)
        assert (answer.returncode, answer.stdout) == (0, "3 + 4 = 7.\n"), answer.stderr
        wrong = manta("chat", "--url", server.base_url, "-m", "hi", "--max-tokens", 5000)
        assert wrong.returncode == 1
        assert "Traceback" not in wrong.stderr
        second = manta("serve", "tiny-chat", "--port", server.port)
        assert second.returncode == 2
        assert f"port {server.port} on 127.0.0.1 is taken" in second.stderr
        load = ["--num-prompts", 16, "--max-concurrency", 4, "--input-len", 50, "--output-len", 20]
        bench = manta("bench", "--url", server.base_url, *load, "-o", figures)
        assert bench.returncode == 0, bench.stderr
    assert "graceful_shutdown failed" not in server.log(), "Ctrl-C ends with an error of Ray's"
    assert "An address was passed" not in server.log(), "a warning of Serve's about what the user did not do"
    measured = json.loads(figures.read_text())
    assert measured["model"] == "mine"
    assert (measured["completed"], measured["total_input_tokens"], measured["total_output_tokens"]) == (16, 800, 320)
    assert 0 < measured["p50_ttft_ms"] < measured["p50_e2el_ms"]
    assert measured["max_concurrent_requests"] <= 4
