"""Each line of the console is JSON where the log is."""

from __future__ import annotations

import json
import logging

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray._private.worker import print_to_stdstream

from app.cli.json_console import json_line, print_lines, use_json_console
from app.telemetry.logging import JsonFormatter

BATCH = {"pid": 7, "actor_name": "ServeReplica:manta:Ingress", "is_err": True, "ip": "192.0.2.2", "job": "01"}


def test_lines_as_ray_brings_them(capsys: pytest.CaptureFixture[str]) -> None:
    own = JsonFormatter().format(logging.LogRecord("manta.access", logging.INFO, "", 0, "GET /", (), None))
    lines = [own, "WARNING 2026-11-23 proxy -- \x1b[36mslow\x1b[0m", "{not JSON", "[1]"]
    print_lines({**BATCH, "lines": lines})
    first, *others = capsys.readouterr().err.splitlines()
    assert first == own
    read = [json.loads(line) for line in others]
    assert [line["msg"] for line in read] == ["WARNING 2026-11-23 proxy -- slow", "{not JSON", "[1]"]
    assert [line["level"] for line in read] == ["WARNING", "INFO", "INFO"]
    assert {(line["process"], line["pid"]) for line in read} == {(BATCH["actor_name"], 7)}
    assert json.loads(json_line("", {"lines": []}))["msg"] == ""


@pytest.mark.parametrize(("form", "replaced"), [("json", True), ("text", False)])
def test_takes_the_place_of_rays_printing(monkeypatch: pytest.MonkeyPatch, form: str, replaced: bool) -> None:
    rays = ("ray_print_logs", print_to_stdstream)
    monkeypatch.setattr(dispatcher, "handlers", [rays])
    monkeypatch.setenv("MANTA_LOG_FORMAT", form)
    use_json_console()
    assert dispatcher.handlers == ([("ray_print_logs", print_lines)] if replaced else [rays])
