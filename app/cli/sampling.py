"""Sampling options of the commands that generate: the fields of SamplingParams, as flags."""

from __future__ import annotations

import argparse
from typing import Any

from app.cli.options import Option, add_options, build, given, options_of
from app.records.sampling_params import SamplingParams

SAMPLING_OPTIONS: tuple[Option, ...] = tuple(options_of(SamplingParams))


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Declare an option for each field."""
    add_options(parser, "sampling options", SAMPLING_OPTIONS)


def sampling_given(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields that were given, checked, over `defaults`. ConfigError names the flag at fault."""
    values = given(args, SAMPLING_OPTIONS)
    merged = {(name,): value for name, value in (defaults or {}).items()} | values
    params = build(SamplingParams, merged, SAMPLING_OPTIONS)
    return params.model_dump(exclude_unset=True)
