"""Plugins of installed packages: found by name, imported when used, checked, and never in the place of ours."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.backends import ROUTING_POLICIES
from app.cli import main
from app.config.router import RouterConfig
from app.deployments.config_check import check_config
from app.deployments.serve.serve_args import parse_args
from app.errors import ConfigError, UnsupportedError
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser_name, tool_parser_name
from app.plugins import ALLOWED_VARIABLE
from tests.limits import patience_s
from tests.plugin_packages import forget_plugins, install, on_the_path

POLICY = """
from app.deployments.routing.policies.round_robin import RoundRobin

class Mine(RoundRobin):
    pass
"""
PARSER = """
from app.parsers.hermes import HermesParser
from app.parsers.think import ThinkParser

class Tools(HermesParser):
    pass

class Thinks(ThinkParser):
    pass
"""


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ALLOWED_VARIABLE, raising=False)
    before = set(sys.modules)
    yield
    forget_plugins()
    for name in set(sys.modules) - before:
        if name.startswith("acme_"):
            del sys.modules[name]


def _policy(folder: Path, name: str = "mine", package: str = "acme-policies", target: str = "acme_policy:Mine") -> None:
    install(folder, package, {"routing_policies": {name: target}}, acme_policy=POLICY)


def test_a_plugin_is_a_choice_and_is_imported_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _policy(tmp_path)
    on_the_path(tmp_path, monkeypatch)
    assert "mine" in ROUTING_POLICIES
    assert [*ROUTING_POLICIES][-1] == "mine"
    assert RouterConfig(policy="mine").policy == "mine"
    assert str(ROUTING_POLICIES.plugin("mine")) == "package acme-policies 1.2 (acme_policy:Mine)"
    assert ROUTING_POLICIES.plugin("round_robin") is None
    assert "acme_policy" not in sys.modules
    assert ROUTING_POLICIES.load("mine").__name__ == "Mine"


def test_help_and_environment_name_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _policy(tmp_path)
    install(tmp_path, "acme-model", {"models": {"AcmeForCausalLM": "acme_model:Acme"}})
    on_the_path(tmp_path, monkeypatch)
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "`mine`isofpackageacme-policies1.2" in "".join(capsys.readouterr().out.split())
    assert main(["models", "--runner", "generate"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Acme"))
    assert line.split()[1] == "generate"
    assert line.endswith("  package acme-model 1.2 (acme_model:Acme)")
    assert main(["collect-env"]) == 0
    assert "routing_policies.mine: package acme-policies 1.2 (acme_policy:Mine)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("allowed", "usable"),
    [("", False), ("other, acme-model", False), ("acme_policies", True), ("other Acme.Policies", True)],
)
def test_only_named_packages_take_part_where_any_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, usable: bool
) -> None:
    _policy(tmp_path)
    monkeypatch.setenv(ALLOWED_VARIABLE, allowed)
    on_the_path(tmp_path, monkeypatch)
    assert ("mine" in ROUTING_POLICIES) == usable
    if usable:
        return
    message = r"routing policy 'mine' is of package acme-policies 1\.2 .*, which MANTA_PLUGINS does not name"
    with pytest.raises(ValueError, match=message):
        RouterConfig(policy="mine")
    with pytest.raises(UnsupportedError, match=message):
        ROUTING_POLICIES.load("mine")
    assert "acme_policy" not in sys.modules


def test_ours_cannot_be_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _policy(tmp_path, "round_robin")
    on_the_path(tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING, "manta.plugins"):
        assert [*ROUTING_POLICIES].count("round_robin") == 1
        assert [*ROUTING_POLICIES]
    assert ROUTING_POLICIES.load("round_robin").__module__.startswith("app.")
    expected = "routing policy 'round_robin' of package acme-policies 1.2 (acme_policy:Mine) is left out"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [expected.split(":")[0]]


def test_two_packages_with_one_name_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _policy(tmp_path / "a")
    _policy(tmp_path / "b", package="zeta")
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    on_the_path(tmp_path / "b", monkeypatch)
    with pytest.raises(ConfigError, match=r"is of package acme-policies 1\.2 .* and of package zeta 1\.2 .*uninstall"):
        ROUTING_POLICIES.load("mine")
    monkeypatch.setenv(ALLOWED_VARIABLE, "zeta")
    assert ROUTING_POLICIES.load("mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("source", "target", "fault"),
    [
        ("import acme_missing_library", "Mine", "cannot be loaded: ModuleNotFoundError: No module named 'acme_missing"),
        ("raise RuntimeError('one\\ntwo')", "Mine", "cannot be loaded: RuntimeError: one two"),
        ("raise SystemExit(3)", "Mine", "cannot be loaded: SystemExit: 3"),
        ("Mine = 1 +", "Mine", "cannot be loaded: SyntaxError"),
        ("", "Mine", "cannot be loaded: AttributeError"),
        ("Mine = 3", "Mine", "is not a subclass of app.deployments.routing.policies.base.RoutingPolicy"),
        ("class Mine:\n    pass", "Mine", "is not a subclass of"),
        (
            "from app.deployments.routing.policies.base import RoutingPolicy\nclass Mine(RoutingPolicy):\n    pass",
            "Mine",
            "does not define choose of app.deployments.routing.policies.base.RoutingPolicy",
        ),
    ],
)
def test_a_broken_one_is_one_line_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, fault: str
) -> None:
    install(tmp_path, "acme-broken", {"routing_policies": {"mine": f"acme_broken:{target}"}}, acme_broken=source)
    on_the_path(tmp_path, monkeypatch)
    assert RouterConfig(policy="mine").policy == "mine"
    with pytest.raises(ConfigError) as error:
        ROUTING_POLICIES.load("mine")
    assert error.value.message.startswith(
        "routing policy 'mine' of package acme-broken 1.2 (acme_broken:Mine) " + fault
    )
    assert "\n" not in error.value.message


def test_a_broken_one_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"routing_policies": {"mine": "acme_broken:Mine"}, "stat_loggers": {"mine": "acme_broken:Mine"}}
    install(tmp_path, "acme-broken", broken, acme_broken="import acme_missing_library")
    on_the_path(tmp_path, monkeypatch)
    for args in (
        {"models": [{"name": "m"}], "router": {"policy": "mine"}},
        {"models": [{"name": "m", "stat_loggers": ["mine"]}]},
    ):
        with pytest.raises(ConfigError, match=r"of package acme-broken 1\.2 .* cannot be loaded: ModuleNotFound"):
            check_config(parse_args(args))


def test_auto_asks_plugins_for_marks_where_none_of_ours_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {
        "tool_parsers": {"acme": "acme_parsers:Tools"},
        "tool_parser_marks": {"acme": "acme_marks:TOOLS", "nobody": "acme_marks:TOOLS"},
        "reasoning_parsers": {"acme": "acme_parsers:Thinks"},
        "reasoning_parser_marks": {"acme": "acme_marks:THINKS"},
    }
    marks = "TOOLS = ('<acme', 'call>')\nTHINKS = ('</acme-think>',)"
    install(tmp_path, "acme-parsers", entries, acme_parsers=PARSER, acme_marks=marks)
    assert tool_parser_name("<acme call>") is None
    on_the_path(tmp_path, monkeypatch)
    assert tool_parser_name("<acme call>") == "acme"
    assert tool_parser_name("<acme") is None
    assert tool_parser_name("<acme call><tool_call>") == "hermes"
    assert reasoning_parser_name("</acme-think>") == "acme"
    assert reasoning_parser_name("</acme-think></think>") == "think"
    assert "acme_parsers" not in sys.modules
    assert TOOL_PARSERS.load("acme").__name__ == "Tools"
    assert REASONING_PARSERS.load("acme").__name__ == "Thinks"


def test_marks_must_be_a_tuple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"tool_parsers": {"acme": "acme_parsers:Tools"}, "tool_parser_marks": {"acme": "acme_marks:TOOLS"}}
    install(tmp_path, "acme-parsers", entries, acme_parsers=PARSER, acme_marks="TOOLS = '<acme>'")
    on_the_path(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"marks of tool parser 'acme' of package acme-parsers .* not an instance of"):
        tool_parser_name("<acme>")


def test_a_command_that_asks_for_none_imports_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as nothing of this one's modules is then in the way."""
    _policy(tmp_path)
    install(
        tmp_path, "acme-broken", {"models": {"AcmeForCausalLM": "acme_broken:M"}}, acme_broken="raise SystemExit(3)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    line = "import sys, app.cli; app.cli.main(['models']); sys.exit(any(m.startswith('acme_') for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, text=True, timeout=patience_s(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "AcmeForCausalLM" in done.stdout
