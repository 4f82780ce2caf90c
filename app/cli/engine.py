"""The engine in this process, for the commands that work without a server."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from app.cli.machine import this_machine
from app.cli.options import Option, add_options, build, given, options_of
from app.cli.preflight import check_offline
from app.config.engine import EngineConfig
from app.records.sampling_params import SamplingParams

if TYPE_CHECKING:
    from app.offline.llm import LLM

# A flag that is also a sampling parameter's (seed) means that one; the engine's has its group in front.
ENGINE_OPTIONS: tuple[Option, ...] = tuple(
    replace(option, flag=f"--engine-{option.flag[2:]}") if option.path[-1] in SamplingParams.model_fields else option
    for option in options_of(EngineConfig, ("engine",), skip=("model", "executor", "step_transport"))
)
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The model and the options of its engine."""
    parser.add_argument(
        "--model",
        default="tiny-chat",
        metavar="MODEL",
        help="a model directory or a built-in model (default: %(default)s)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template instead of the model's own")
    add_options(parser, "engine options", ENGINE_OPTIONS)


def offline_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that was asked for, checked against this machine. Errors are those of the preflight."""
    values = {("model",): args.model, **given(args, ENGINE_OPTIONS)}
    sizes = {str(value) for path, value in values.items() if path[-1] in PARALLEL_SIZES}
    values["executor",] = "local_processes" if sizes - {"1"} else "in_process"
    config = build(EngineConfig, values, ENGINE_OPTIONS)
    check_offline(config, this_machine())
    logging.getLogger("app").setLevel(logging.WARNING)
    return config


def start_llm(args: argparse.Namespace) -> LLM:
    """Check first, then load. Errors are those of the preflight and of LLM, one line each."""
    config = offline_config(args)
    from app.offline.llm import LLM

    options = config.model_dump(exclude_unset=True)
    return LLM(options.pop("model"), chat_template=args.chat_template, **options)
