"""`manta collect-env`."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

import pytest

from tests.cli.conftest import Manta


def test_facts_without_secrets(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SOMETHING", "visible")
    monkeypatch.setenv("HF_TOKEN", "hidden-value")
    monkeypatch.setenv("MY_PRIVATE", "hidden-value")
    facts = json.loads(manta("collect-env", "--json").out)
    assert facts["manta"]["python"] == platform.python_version()
    assert facts["packages"]["torch"] == version("torch")
    assert facts["environment"]["RAY_SOMETHING"] == "visible"
    assert facts["environment"]["HF_TOKEN"] == "(set)"
    text = manta("collect-env").out
    assert "hidden-value" not in text
    assert f"  torch: {version('torch')}" in text
