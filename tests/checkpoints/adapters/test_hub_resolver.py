"""Adapters of a hub, from a local server of the hub's HTTP API: what is allowed alone is asked for, at one commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from app.backends import ADAPTER_RESOLVERS
from app.checkpoints.adapters.adapter_files import AdapterFiles, within
from app.checkpoints.adapters.hub_resolver import HubResolver
from app.config.model import ModelConfig
from app.errors import CheckpointError, ServerOverloadedError, UnsupportedError
from tests.adapters import write_adapter
from tests.checkpoints.hub_mirror import COMMIT, TOKEN, Mirror, served

FILES = {"adapter_config.json", "adapter_model.safetensors"}
NEWER = "f" * 40


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    directory = write_adapter(tmp_path / "repository")
    (directory / "README.md").write_text("more")
    write_adapter(directory / "inner" / "one", r=4)
    (directory / "pickled").mkdir()
    (directory / "pickled" / "adapter_config.json").write_text("{}")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with served(directory) as mirror:
        monkeypatch.setenv("HF_ENDPOINT", mirror.url)
        yield mirror


@pytest.fixture
def root(tmp_path: Path) -> Path:
    own = tmp_path / "adapters"
    own.mkdir()
    return own


def test_an_adapter_is_downloaded_once(mirror: Mirror, root: Path) -> None:
    found = HubResolver(root, ["org/model"]).find("org/model")
    assert found is not None
    assert within(str(found), [root]), "what lies there leads out of it"
    assert AdapterFiles.read(found, 16).rank == 4
    assert set(mirror.downloaded) == FILES
    before = mirror.requests
    assert HubResolver(root, ["org/model"]).find("org/model") == found
    assert mirror.requests == before


def test_a_folder_of_a_repository_is_an_adapter(mirror: Mirror, root: Path) -> None:
    found = HubResolver(root, ["org/*"]).find("org/model/inner/one")
    assert found is not None
    assert AdapterFiles.read(found, 16).rank == 4
    assert {name.rpartition("/")[0] for name in mirror.downloaded} == {"inner/one"}


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_a_revision_means_the_commit_that_it_meant_first(mirror: Mirror, root: Path, revision: str) -> None:
    allowed = [f"org/model{revision}"]
    found = HubResolver(root, allowed).find("org/model")
    mirror.commits.append(NEWER)
    assert HubResolver(root, allowed).find("org/model") == found
    (pin,) = (root / "pinned").iterdir()
    assert pin.read_text() == COMMIT
    pin.unlink()
    newer = HubResolver(root, allowed).find("org/model")
    assert newer is not None
    assert newer.name == NEWER
    pin.write_text("main")
    with pytest.raises(CheckpointError, match="holds no commit"):
        HubResolver(root, allowed).find("org/model")


def test_a_commit_may_be_given(mirror: Mirror, root: Path) -> None:
    mirror.commits.append(NEWER)
    found = HubResolver(root, [f"org/model@{COMMIT}", "org/*"]).find("org/model")
    assert found is not None
    assert found.name == COMMIT
    assert not (root / "pinned").exists()


@pytest.mark.parametrize(
    "name",
    [
        "", "model", "org", "org/", "/org/model", "other/model", "org/model/../../x", "org/mo..del", "org/a--b",
        "org/model/.hidden", "org/model/a\n", "org/" + "a" * 97, "org/model" + "/a" * 9, "org/é", "org/model@v1",
    ],
)  # fmt: skip
def test_no_other_name_is_asked_for(mirror: Mirror, root: Path, name: str) -> None:
    assert HubResolver(root, ["org/*", "org/model"]).find(name) is None
    assert mirror.requests == 0


def test_what_is_not_there_is_absent(mirror: Mirror, root: Path) -> None:
    resolver = HubResolver(root, ["org/*"])
    assert [resolver.find(name) for name in ("org/nothing", "org/model/nothing", "org/ends-")] == [None] * 3
    assert not mirror.downloaded


def test_what_may_not_be_had_is_named(mirror: Mirror, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = HubResolver(root, ["org/*"])
    with pytest.raises(CheckpointError, match="org/gated is gated: HF_TOKEN"):
        resolver.find("org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolver.find("org/gated") is not None
    with pytest.raises(UnsupportedError, match="pickles are not read"):
        resolver.find("org/model/pickled")
    with pytest.raises(CheckpointError, match="no such revision"):
        HubResolver(root, ["org/model@v9"]).find("org/model")


def test_nothing_is_downloaded_without_room(mirror: Mirror, root: Path) -> None:
    size = sum((mirror.directory / name).stat().st_size for name in FILES)
    with pytest.raises(CheckpointError, match=f"adapter_download_bytes={size - 1:,}"):
        HubResolver(root, ["org/*"], size - 1).find("org/model")
    assert not mirror.downloaded
    both = HubResolver(root, ["org/*"], size + 100)
    assert both.find("org/model") is not None
    (mirror.directory / "inner/one/adapter_config.json").write_text(json.dumps({"r": "x" * 200}))
    with pytest.raises(CheckpointError, match=f"beside {size:,} that lie there"):
        both.find("org/model/inner/one")


def test_a_hub_that_says_no_sizes_or_too_large_ones(mirror: Mirror, root: Path) -> None:
    resolver = HubResolver(root, ["org/*"])
    (mirror.directory / "adapter_config.json").write_text(" " * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json has 1048577 bytes; at most 1048576"):
        resolver.find("org/model")
    mirror.says_sizes = False
    with pytest.raises(CheckpointError, match="has None bytes"):
        resolver.find("org/model")
    assert not mirror.downloaded


def test_a_hub_that_cannot_be_reached_is_asked_again(
    mirror: Mirror, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = HubResolver(root, ["org/*"])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ServerOverloadedError, match="cannot be asked for org/model now"):
        resolver.find("org/model")
    monkeypatch.setenv("HF_ENDPOINT", mirror.url)
    found = resolver.find("org/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolver.find("org/model") == found
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        resolver.find("org/gated")


def test_a_model_says_what_is_allowed(root: Path) -> None:
    values = {"name": "m", "engine": {"enable_lora": True}, "adapter_resolver": "hub", "adapter_directory": str(root)}
    with pytest.raises(ValueError, match="adapter_repositories and adapter_resolver: hub: give both"):
        ModelConfig.model_validate(values)
    for bad in ("model", "org/*@v1", "org/../x", "*/model", "org/model@", "org/model/inner"):
        with pytest.raises(ValueError, match="adapter_repositories"):
            ModelConfig.model_validate({**values, "adapter_repositories": [bad]})
    config = ModelConfig.model_validate({**values, "adapter_repositories": ["org/*", "org/model@v1"]})
    resolver = ADAPTER_RESOLVERS.load("hub").of(config)
    assert isinstance(resolver, HubResolver)
    assert resolver.find("other/model") is None
