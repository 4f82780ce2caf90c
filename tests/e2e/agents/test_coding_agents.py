"""Coding agents, unchanged, let a model of a long context write a file and answer whatever comes, through Manta."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve_process import ROOT, ServeProcess
from tests.e2e.agents.agent_model import write_model
from tests.e2e.agents.known_answers import ANSWERS, ASK, CHAT, FILE, LAST_WORDS, TEXT, template
from tests.e2e.agents.programs import PROGRAMS, Program
from tests.e2e.conftest import Record
from tests.limits import patience_s

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    path = write_model(tmp_path_factory.mktemp("agent"), ANSWERS, template())

    def edit(config: dict[str, Any]) -> None:
        (model,) = config["applications"][0]["args"]["models"]
        model["name"] = "agent"
        model["engine"] = {"model": str(path), "kv_cache_memory_bytes": 256 << 20}

    config = ROOT / "configs/serve/quickstart.yaml"
    with ServeProcess(config, edit, ready_timeout_s=patience_s(), ends_gracefully=False) as server:
        yield server


def _answered(server: ServeProcess) -> dict[tuple[str, str], float]:
    """Requests so far, by route and status, those of the figures themselves aside; and prompt tokens."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=patience_s()).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {
        (sample.labels["handler"], sample.labels["status"]): sample.value
        for sample in samples
        if sample.name == "http_requests_total" and sample.labels["handler"] != "/metrics"
    }
    tokens = sum(sample.value for sample in samples if sample.name == "vllm:prompt_tokens_total")
    return found | {("prompt tokens", ""): tokens}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.command)
@pytest.mark.parametrize("ask", [CHAT, ASK], ids=["random answer", "file"])
def test_program(server: ServeProcess, tmp_path: Path, record: Record, program: Program, ask: str) -> None:
    program.install()
    before = _answered(server)
    done = program.run(ask, server.base_url, tmp_path)
    said = f"{done.stdout}\n{done.stderr}\n{server.log()[-2000:]}"
    assert done.returncode == 0, said
    new = {key: value - before.get(key, 0.0) for key, value in _answered(server).items()}
    tokens = new.pop(("prompt tokens", ""))
    counts = {f"{handler} {status}": count for (handler, status), count in new.items() if count}
    assert any("/v1/" in key for key in counts), said
    assert [key for key in counts if not key.endswith(" 2xx")] == [], said
    name = "chat" if ask == CHAT else "file"
    figures = {"version": program.version(), "requests": counts, "prompt_tokens": tokens}
    record(f"coding_agents_{program.command}_{name}", figures)
    if ask == ASK:
        assert (tmp_path / "work" / FILE).read_text() == f"{TEXT}\n", said
        assert program.command == "aider" or LAST_WORDS in done.stdout, said
