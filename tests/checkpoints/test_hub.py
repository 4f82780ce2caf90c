"""A model by its name on a hub, from a local server of the hub's HTTP API: only what is needed is downloaded, once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import huggingface_hub.constants
import pytest

from app import LLM, SamplingParams
from app.checkpoints import hub
from app.checkpoints.known_models import KNOWN_MODELS
from app.checkpoints.model_info import ASSETS, ModelInfo, fetch_model_weights, tokenizer_directory
from app.checkpoints.model_revision import model_revision
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError
from tests.checkpoints.hub_mirror import COMMIT, TOKEN, Mirror, served

MODEL = "org/model"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    directory = Path(shutil.copytree(ASSETS / "tiny-chat", tmp_path / "repository"))
    for name in ("modeling_tiny.py", "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json", "README.md"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it is read when that is imported
    hub.fetch_description.cache_clear()
    with served(directory) as mirror:
        monkeypatch.setenv("HF_ENDPOINT", mirror.url)
        yield mirror
    hub.fetch_description.cache_clear()


def config(tmp_path: Path, model: str = MODEL, **options: str) -> EngineConfig:
    return EngineConfig.model_validate({"model": model, "download_dir": str(tmp_path / "cache"), **options})


def test_a_hubs_model_answers_as_its_directory_does(mirror: Mirror, tmp_path: Path) -> None:
    options = {"num_blocks": 64, "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=8)
    answers = []
    for model, where in ((MODEL, {"download_dir": str(tmp_path / "cache")}), ("tiny-chat", {})):
        with LLM(model, **options, **where) as llm:
            answers.append(llm.generate("The capital of France", params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    wanted = {path.name for path in (ASSETS / "tiny-chat").iterdir()}
    assert set(mirror.downloaded) == {name for name in wanted if name.endswith((".json", ".jinja", ".safetensors"))}
    assert len(mirror.downloaded) == len(set(mirror.downloaded))


def test_a_host_process_downloads_no_weights(mirror: Mirror, tmp_path: Path) -> None:
    info = ModelInfo.of(config(tmp_path))
    assert info.directory.name == COMMIT
    assert "model.safetensors" not in mirror.downloaded
    before = model_revision(info, config(tmp_path))
    fetch_model_weights(config(tmp_path), info)
    assert mirror.downloaded.count("model.safetensors") == 1
    assert model_revision(info, config(tmp_path)) == before  # the same on nodes with and without weights


def test_bin_files_where_there_is_nothing_better(mirror: Mirror, tmp_path: Path) -> None:
    (mirror.directory / "model.safetensors").unlink()
    info = ModelInfo.of(config(tmp_path))
    fetch_model_weights(config(tmp_path), info)
    assert (info.directory / "pytorch_model.bin").is_file()
    (mirror.directory / "pytorch_model.bin").unlink()


def test_adapters_come_with_the_model_whose_weights_they_are(mirror: Mirror, tmp_path: Path) -> None:
    """Jina Embeddings v5's, of the task that is served; another repository's are no part of its weights."""
    name = "adapters/{}/adapter_model.safetensors"
    for task in ("retrieval", "clustering"):
        (mirror.directory / name.format(task)).parent.mkdir(parents=True)
        (mirror.directory / name.format(task)).write_text("{}")
    info = ModelInfo.of(config(tmp_path))
    fetch_model_weights(config(tmp_path), info)
    assert not [one for one in mirror.downloaded if one.startswith("adapters/")]
    info.hf_config.update(model_type="jina_embeddings_v5", jina_task="clustering")
    fetch_model_weights(config(tmp_path), info)
    assert [one for one in mirror.downloaded if one.startswith("adapters/")] == [name.format("clustering")]


def test_what_is_downloaded_serves_without_a_network(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = ModelInfo.of(config(tmp_path))
    hub.fetch_description.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    requests = mirror.requests
    assert ModelInfo.of(config(tmp_path)).directory == info.directory
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids"):  # its weights are not there
        fetch_model_weights(config(tmp_path), info)
    assert mirror.requests == requests


def test_gated_models_need_the_token(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"'org/gated': gated on .*HF_TOKEN"):
        ModelInfo.of(config(tmp_path, "org/gated"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert ModelInfo.of(config(tmp_path, "org/gated")).vocab_size > 0


def test_mistakes_are_named(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"'org/other': no such path, and no such repository on http"):
        ModelInfo.of(config(tmp_path, "org/other"))
    with pytest.raises(CheckpointError, match=r"has no revision 'v9'") as caught:
        ModelInfo.of(config(tmp_path, revision="v9"))
    assert caught.value.param == "revision"
    assert ModelInfo.of(config(tmp_path, revision="v1")).directory.name == COMMIT
    with pytest.raises(ConfigError, match="revision=v1: model 'tiny-chat' is a directory"):
        ModelInfo.of(config(tmp_path, "tiny-chat", revision="v1"))
    hub.fetch_description.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"not downloaded yet, and http://127\.0\.0\.1:9 cannot be reached"):
        ModelInfo.of(config(tmp_path / "empty"))


def test_an_index_names_files_not_patterns(mirror: Mirror, tmp_path: Path) -> None:
    (mirror.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head": "*"}}))
    info = ModelInfo.of(config(tmp_path))
    fetch_model_weights(config(tmp_path), info)
    assert "README.md" not in mirror.downloaded


@pytest.mark.parametrize("where", ["HF_ENDPOINT", "HTTPS_PROXY"])
def test_passwords_of_addresses_are_not_shown(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://me:secret@127.0.0.1:9"
    monkeypatch.setenv(where, url)

    def fails(*args: object, **options: object) -> None:
        raise httpx.ProxyError(f"no way to {url}/api/models")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    hub.fetch_description.cache_clear()
    with pytest.raises(CheckpointError, match=r"//\*\*\*@127\.0\.0\.1:9") as caught:
        ModelInfo.of(config(tmp_path))
    assert "secret" not in str(caught.value)


def test_a_path_is_no_name_of_a_hub(tmp_path: Path) -> None:
    names = ("a/b", "/a/b", "./a", "a", "a/b/c", "~/a", "../b", str(tmp_path))
    assert [name for name in names if hub.repository_of(name) is not None] == ["a/b"]


def test_an_error_that_says_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(*args: object, **options: object) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", times_out)
    hub.fetch_description.cache_clear()
    with pytest.raises(CheckpointError, match=r"cannot be downloaded from .*: ReadTimeout"):
        ModelInfo.of(config(tmp_path))


def test_a_well_known_name_is_its_repository(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, Any]", KNOWN_MODELS), "tiny", {"4m": MODEL})
    named = config(tmp_path, "Tiny:4M", tokenizer="tiny:4m")
    info = ModelInfo.of(named)
    assert info.directory == tokenizer_directory(named, info) == ModelInfo.of(config(tmp_path)).directory
    fetch_model_weights(named, info)
    assert mirror.downloaded.count("model.safetensors") == 1
    (tmp_path / "tiny:4m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="'tiny:4m' is not a model directory"):  # a path that exists is the path
        ModelInfo.of(config(tmp_path, "tiny:4m"))


def test_a_hub_that_cannot_be_reached_is_said_with_both_names(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = r"^qwen3:0\.6b is Qwen/Qwen3-0\.6B of the hub; model 'Qwen/Qwen3-0\.6B': .* cannot be reached$"
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelInfo.of(config(tmp_path, "qwen3:0.6b"))
    assert caught.value.param == "model"


@pytest.mark.parametrize("name", ["qwen3", "qwen3:7b", "qwen3:latest"])
def test_sizes_that_there_are_are_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"'{name}': no such path.*; known: qwen3:0\.6b, qwen3:1\.7b, "):
        ModelInfo.of(config(tmp_path, name))
