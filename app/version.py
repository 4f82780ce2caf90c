"""The version this server reports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed_version() -> str:
    try:
        return version("manta-serve")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0+source"


VERSION = _installed_version()
