"""The models that come with the code; the one that sees is put together of the other's weights and its own front."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.checkpoints import built_in
from app.checkpoints.built_in import ASSETS, BUILT_IN_MODELS, built_in_directory
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.safetensors_header import SafetensorsHeader
from app.checkpoints.weight_files import weight_files
from app.errors import CheckpointError

FRONT = ASSETS / "tiny-chat-sees" / "front.safetensors"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built_in._whole.cache_clear()
    yield tmp_path
    built_in._whole.cache_clear()


def stored(*files: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensors of files: type, shape and bytes."""
    found = {}
    for file in files:
        content = file.read_bytes()
        for name, entry in SafetensorsHeader.read(file).tensors.items():
            found[name] = entry.dtype, entry.shape, content[entry.begin : entry.end]
    return found


def test_each_is_a_directory_of_its_own() -> None:
    assert len({built_in_directory(name) for name in BUILT_IN_MODELS}) == len(BUILT_IN_MODELS)
    for name in BUILT_IN_MODELS:
        assert ModelInfo.from_directory(name).vocab_size == 1024 or name == "tiny-chat-hears"


def test_the_one_that_sees_is_the_other_and_its_front_bit_for_bit(home: Path) -> None:
    directory = built_in_directory("tiny-chat-sees")
    assert directory.is_relative_to(home)
    whole = stored(*weight_files(directory, "safetensors"))
    text = stored(ASSETS / "tiny-chat" / "model.safetensors")
    front = stored(FRONT)
    assert whole == {**front, **{f"language_model.{name}": tensor for name, tensor in text.items()}}
    assert not list(directory.glob("front*"))


def test_it_takes_little_room() -> None:
    assert sum(file.stat().st_size for file in (ASSETS / "tiny-chat-sees").iterdir()) <= 1_500_000


def test_it_is_put_together_once_and_anew_when_a_file_changes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built_in_directory("tiny-chat-sees")
    inode = first.stat().st_ino
    built_in._whole.cache_clear()
    assert built_in_directory("tiny-chat-sees") == first
    assert first.stat().st_ino == inode
    assets = tmp_path / "assets"
    for name in ("tiny-chat", "tiny-chat-sees"):
        (assets / name).mkdir(parents=True)
        for file in (ASSETS / name).iterdir():
            (assets / name / file.name).write_bytes(file.read_bytes())
    card = assets / "tiny-chat-sees" / "README.md"
    card.write_text("another card")
    monkeypatch.setattr(built_in, "ASSETS", assets)
    built_in._whole.cache_clear()
    other = built_in_directory("tiny-chat-sees")
    assert other != first
    assert (other / "README.md").read_text() == "another card"
    front = assets / "tiny-chat-sees" / "front.safetensors"
    front.write_bytes(front.read_bytes()[:-1])
    built_in._whole.cache_clear()
    with pytest.raises(CheckpointError, match="front"):
        built_in_directory("tiny-chat-sees")
