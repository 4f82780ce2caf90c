"""What is made of a user's files: once, whole, and somewhere else where the home cannot be written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.checkpoints.user_cache import kept_files, made_once, user_cache


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def fill(directory: Path) -> None:
    directory.mkdir()
    (directory / "a").write_text("whole")


def test_it_is_made_once(home: Path) -> None:
    made = made_once("things", "key", fill)
    assert made == home / "cache" / "manta" / "things" / "key"
    assert (made / "a").read_text() == "whole"

    def again(directory: Path) -> None:
        raise AssertionError("made twice")

    assert made_once("things", "key", again) == made


def test_what_fails_leaves_nothing(home: Path) -> None:
    def fails(directory: Path) -> None:
        fill(directory)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made_once("things", "key", fails)
    assert list((home / "cache" / "manta" / "things").iterdir()) == []


def test_another_process_was_faster(home: Path) -> None:
    def slow(directory: Path) -> None:
        fill(directory)
        fill(home / "cache" / "manta" / "things" / "key")

    assert (made_once("things", "key", slow) / "a").read_text() == "whole"


def test_a_home_that_cannot_be_written_to(home: Path) -> None:
    (home / "cache").write_text("no directory")
    found = user_cache("things")
    assert found.is_dir()
    assert not found.is_relative_to(home)


def test_kept_files_are_looked_at(home: Path) -> None:
    """A name promises nothing: files that are others, fewer or more are made anew."""
    files = {"a": b"one", "b": b"two"}
    made = kept_files("things", "name", files)
    inode = made.stat().st_ino
    assert kept_files("things", "name", files) == made
    assert made.stat().st_ino == inode, "made once"
    for spoil in (lambda: (made / "a").write_bytes(b"eno"), lambda: (made / "b").unlink(), (made / "c").touch):
        spoil()
        assert kept_files("things", "name", files) == made
        assert {file.name: file.read_bytes() for file in made.iterdir()} == files
    assert kept_files("things", "name", {**files, "a": b"1"}) != made
    assert sorted(made.parent.iterdir()) == sorted([made, kept_files("things", "name", {**files, "a": b"1"})])
