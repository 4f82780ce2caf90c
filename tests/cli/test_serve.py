"""`manta serve` up to the moment when it becomes `serve run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import serve
from app.cli.configuration import THROUGHPUT_MODE
from app.cli.machine import Machine
from app.cli.ray_settings import RAY_SETTINGS
from app.config.serve import ServeConfig
from benchmarks.serve_process import ROOT, free_port
from tests.cli.conftest import Manta

Call = tuple[str, list[str], dict[str, str]]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What would have been executed."""
    found: list[Call] = []
    monkeypatch.setattr(serve, "find_machine", lambda: Machine("this machine", 8, 0, 16 << 30, None))
    monkeypatch.setattr(serve.os, "execve", lambda path, argv, env: found.append((path, argv, env)))
    return found


def written(path: str | Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(Path(path).read_text())
    return loaded


def test_the_mode_is_the_quickstarts() -> None:
    quickstart = written(ROOT / "configs/serve/quickstart.yaml")
    assert quickstart["applications"][0]["runtime_env"]["env_vars"] == THROUGHPUT_MODE
    assert quickstart["controller_options"]["runtime_env"]["env_vars"] == THROUGHPUT_MODE


def test_a_model_becomes_a_configuration(manta: Manta, calls: list[Call], tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "mine.yaml"
    options = ["--port", port, "--kv-cache-memory-bytes", 64 << 20, "--router-policy", "round_robin"]
    done = manta("serve", "tiny-chat", *options, "--ingress-limits-max-n", 4, "--no-enable-prefix-caching",
                 "--aliases", "a", "--aliases", "b", "-o", file)  # fmt: skip
    path, argv, environment = calls[0]
    assert path == sys.executable
    assert argv[1:] == ["-m", "app.cli.deployment", str(file)]
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert str(ROOT) in environment["PYTHONPATH"].split(":")
    document, quickstart = written(file), written(ROOT / "configs/serve/quickstart.yaml")
    application = document["applications"][0]
    assert application["args"] == {
        "models": [
            {
                "name": "tiny-chat",
                "aliases": ["a", "b"],
                "engine": {
                    "model": "tiny-chat",
                    "kv_cache_memory_bytes": 64 << 20,
                    "enable_prefix_caching": False,
                },
            }
        ],
        "ingress": {"limits": {"max_n": 4}},
        "router": {"policy": "round_robin"},
    }
    assert document["http_options"] == {"host": "127.0.0.1", "port": port}
    for key in ("proxy_location", "controller_options"):
        assert document[key] == quickstart[key]
    assert f"http://127.0.0.1:{port}/v1/chat/completions" in done.out
    assert str(file) in done.out


def test_what_it_writes_it_can_serve(manta: Manta, calls: list[Call], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert manta("serve", "--port", free_port(), "-o", file, "--dry-run").code == 0
    assert calls == []
    manta("serve", file)
    assert calls[0][1][-1] == str(file)


def test_a_yaml_is_served_as_it_is(manta: Manta, calls: list[Call]) -> None:
    manta("serve", ROOT / "configs/serve/quickstart.yaml", "--skip-preflight")
    assert calls[0][1][-1] == str(ROOT / "configs/serve/quickstart.yaml")


def test_options_on_top_of_a_yaml(manta: Manta, calls: list[Call]) -> None:
    source = ROOT / "configs/serve/two-replicas.yaml"
    manta("serve", source, "--num-replicas", 3, "--port", free_port())
    document, original = written(calls[0][1][-1]), written(source)
    model = document["applications"][0]["args"]["models"][0]
    assert model.pop("num_replicas") == 3
    original_model = original["applications"][0]["args"]["models"][0]
    del original_model["num_replicas"]
    assert model == original_model
    assert document["applications"][0]["args"]["ingress"] == original["applications"][0]["args"]["ingress"]


def test_options_need_one_model(manta: Manta, tmp_path: Path) -> None:
    document = written(ROOT / "configs/serve/quickstart.yaml")
    document["applications"][0]["args"]["models"].append({"name": "b"})
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump(document))
    assert "--dtype" in manta("serve", file, "--dtype", "float32").mistake
    assert "not exactly one model" in manta("serve", file, "--dtype", "float32").mistake


def test_local_paths_become_absolute(
    manta: Manta, calls: list[Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-model").symlink_to(ROOT / "app/assets/tiny-chat")
    monkeypatch.chdir(tmp_path)
    manta("serve", "my-model", "--port", free_port())
    model = written(calls[0][1][-1])["applications"][0]["args"]["models"][0]
    assert Path(model["engine"]["model"]).is_absolute()


def test_a_cluster_of_its_own_is_closed() -> None:
    own = serve.command_line(Path("x"), {})[1]
    assert (own["RAY_AUTH_MODE"], own["RAY_ADDRESS"]) == ("token", "local")
    assert serve.command_line(Path("x"), {"RAY_AUTH_MODE": "disabled"})[1]["RAY_AUTH_MODE"] == "disabled"


def test_only_a_cluster_of_its_own_gets_settings_and_a_dashboard_where_one_is_wanted() -> None:
    argv, own = serve.command_line(Path("x"), {"RAY_event_stats": "1"})
    assert own.items() >= {**RAY_SETTINGS, "RAY_event_stats": "1"}.items(), "what is set already stays"
    assert argv[-1] == "x"
    assert serve.command_line(Path("x"), {}, dashboard=True)[0] == [*argv, "--dashboard"]
    assert RAY_SETTINGS.keys().isdisjoint(serve.command_line(Path("x"), {}, "10.0.0.1:6379")[1])


def test_a_cluster_that_is_joined_is_shown_the_token_there_is(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    joined = serve.command_line(Path("x"), home, "10.0.0.1:6379")[1]
    assert joined["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert "RAY_AUTH_MODE" not in joined
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 32)
    assert serve.command_line(Path("x"), home, "10.0.0.1:6379")[1]["RAY_AUTH_MODE"] == "token"
    refused = {**home, "RAY_AUTH_MODE": "disabled"}
    assert serve.command_line(Path("x"), refused, "10.0.0.1:6379")[1]["RAY_AUTH_MODE"] == "disabled"


def test_output_is_not_written_over(manta: Manta, tmp_path: Path) -> None:
    file, port = tmp_path / "mine.yaml", free_port()
    file.write_text("mine: 1\n")
    command = ("serve", "tiny-chat", "--port", port, "--dry-run", "-o", file)
    assert manta(*command).mistake == f"--output: {file} exists, with other content: name another file, or add --force"
    assert file.read_text() == "mine: 1\n"
    assert manta(*command, "--force").code == 0
    assert written(file)["http_options"]["port"] == port
    assert manta(*command).code == 0, "the same again changes nothing"


def test_the_commands_shown_can_be_pasted(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = manta("serve", "tiny-chat", "--port", free_port()).out
    command = next(line.split()[2] for line in shown.splitlines() if line.startswith("try it:"))
    assert command == "manta" or Path(command).is_file()
    monkeypatch.setenv("PATH", "/nowhere")
    shown = manta("serve", "tiny-chat", "--port", free_port()).out
    assert Path(next(line.split()[2] for line in shown.splitlines() if line.startswith("try it:"))).is_file()


def test_effective_arguments_are_a_serve_config(manta: Manta) -> None:
    document = yaml.safe_load(manta("config").out)
    assert ServeConfig(**document["applications"][0]["args"]) == ServeConfig(
        models=({"name": "tiny-chat", "engine": {"model": "tiny-chat"}},)
    )


def test_keys_in_the_lines_to_paste(manta: Manta, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = ("serve", "tiny-chat", "--port", free_port(), "-o", tmp_path / "mine.yaml")
    bearer = '-H "Authorization: Bearer $MANTA_API_KEY" -d'
    assert bearer not in manta(*command).out
    monkeypatch.setenv("MANTA_API_KEYS", "a-secret-key")
    shown = manta(*command).out
    assert bearer in shown
    assert "a-secret-key" not in shown
