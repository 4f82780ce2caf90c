"""Settings of Ray by names that Ray reads: a renamed one would be ignored without a word."""

from __future__ import annotations

from pathlib import Path

import ray

from app.cli.ray_settings import RAY_SETTINGS

READERS = (
    "serve/_private/constants.py",
    "_private/log_monitor.py",
    "dashboard/modules/reporter/reporter_consts.py",
    "core/src/ray/raylet/raylet",
    "core/src/ray/gcs/gcs_server",
)


def test_ray_knows_every_name() -> None:
    files = [(Path(ray.__file__).parent / reader).read_bytes() for reader in READERS]
    unknown = [name for name in RAY_SETTINGS if not any(name.encode() in file for file in files)]
    assert unknown == []
