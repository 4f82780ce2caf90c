"""Kinds of devices: one file each, one line each in `app.backends.PLATFORMS`."""

from __future__ import annotations

from functools import cache

import torch

from app.backends import PLATFORMS
from app.platforms.base import Platform


def select_platform(name: str) -> Platform:
    """The platform `name` (`auto`: the last of the table that has a device here). UnsupportedError: no such one."""
    if name != "auto":
        return _load(name)
    return next(platform for platform in _newest_first(PLATFORMS.names) if platform.count())


def platform_of(device: torch.device) -> Platform:
    """Finds whose device it is: the last of the table that serves its type. A type of nobody's (meta, where a model is
    born) is the CPU's."""
    return _of_type(device.type, PLATFORMS.names)


@cache
def _of_type(device_type: str, names: tuple[str, ...]) -> Platform:
    serving = (platform for platform in _newest_first(names) if platform.serves(device_type))
    return next(serving, None) or _load("cpu")


def _load(name: str) -> Platform:
    made: Platform = PLATFORMS.load(name)()
    return made


def _newest_first(names: tuple[str, ...]) -> list[Platform]:
    return [_load(name) for name in reversed(names)]
