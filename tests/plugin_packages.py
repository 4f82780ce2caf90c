"""Installed packages with plugins, for tests: a folder with the metadata of one, which Python finds as any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from app import plugins


def forget_plugins() -> None:
    """Processes read the metadata once; a test that installs something wants it read again."""
    plugins.installed.cache_clear()
    plugins._say_hidden.cache_clear()


def install(folder: Path, package: str, entries: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """Write a package's metadata, by group and name of its entry points, and its modules."""
    metadata = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    lines = []
    for group, named in entries.items():
        lines += [f"[manta.{group}]", *(f"{name} = {target}" for name, target in named.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)


def on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find what is installed in a folder."""
    monkeypatch.syspath_prepend(str(folder))
    forget_plugins()
