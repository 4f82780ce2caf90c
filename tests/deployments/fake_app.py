"""`import_path` of the deployments' tests: the real graph over the fake engine."""

from __future__ import annotations

from typing import Any

from ray import serve

from app.deployments.app import build_graph
from app.deployments.serve.serve_args import parse_args
from tests.deployments.fake_engine import FakeEngine


def build(args: dict[str, Any]) -> serve.Application:
    return build_graph(parse_args(args), FakeEngine)
