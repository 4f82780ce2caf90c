"""The line that says why a part of the application cannot start."""

from __future__ import annotations

import asyncio
import logging

import pytest
import ray

from app.deployments.app import build
from app.deployments.process.start_errors import logs_start_error
from app.errors import ConfigError


class Replica:
    @logs_start_error("a replica")
    async def __init__(self, error: Exception | None) -> None:  # type: ignore[misc]
        await asyncio.sleep(0)
        if error is not None:
            raise error
        self.started = True


def construct(error: Exception | None) -> Replica:
    replica = object.__new__(Replica)
    asyncio.run(Replica.__init__(replica, error))  # type: ignore[func-returns-value,misc]
    return replica


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR, "manta.serve")
    logging.getLogger("manta").addHandler(caplog.handler)
    return caplog


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("a: wrong\nb: wrong too"), "a replica cannot start: a: wrong; b: wrong too"),
        (RuntimeError("\nfirst\nlast"), "a replica cannot start: RuntimeError: last"),
        (ValueError(), "a replica cannot start: ValueError: no message"),
    ],
)
def test_one_line(said: pytest.LogCaptureFixture, error: Exception, line: str) -> None:
    with pytest.raises(type(error)):
        construct(error)
    assert {record.getMessage() for record in said.records} == {line}


def test_silent_when_it_starts(said: pytest.LogCaptureFixture) -> None:
    assert construct(None).started
    assert not said.records


def test_build_checks_what_one_node_can_tell(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve run` has no preflight: its build task finds the same."""
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0})
    for bad, says in (
        ({"models": [{"name": "a", "tool_parser": "foo"}]}, "tool_parser: unknown tool parser 'foo'"),
        ({"models": [{"name": "a", "engine": {"tensor_parallel_size": 3}}]}, "tensor_parallel_size=3 does not divide"),
        ({"models": [{"name": "a"}], "ingress": {"api_keys_file": "nokeys.txt"}}, "api_keys_file: cannot read nokeys"),
        ({"models": [{"name": "a", "engine": {"model": "/nowhere"}}]}, "no such path"),
    ):
        said.clear()
        with pytest.raises(ConfigError if "path" not in says else Exception, match=says):
            build(bad)
        assert any(says in record.getMessage() for record in said.records)
    elsewhere = {"models": [{"name": "a", "engine": {"model": "/nowhere", "device": "cuda"}}]}
    assert build(elsewhere), "the nodes with GPUs, and the model, are yet to come"
    nodes.append(nodes[0])
    elsewhere["models"][0]["engine"] = {"model": "/nowhere"}
    assert build(elsewhere), "the model may lie on the other node"
