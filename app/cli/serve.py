"""`manta serve`: check, write the Serve configuration that is to run, and become `serve run` on it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.cli.command import Command
from app.cli.configuration import Configuration, resolve
from app.cli.machine import find_machine
from app.cli.preflight import check
from app.cli.target import add_target, options_given
from app.config import KEYS_FILE_VARIABLE, KEYS_VARIABLE
from app.deployments.haproxy import lost_settings
from app.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent  # of the package: replicas must be able to import it
HEADER = "# Written by `manta serve`; all options and their meaning: `manta serve --help`. Run it: manta serve {path}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target and options, and what to do with the configuration."""
    add_target(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="where to write the configuration (default: a file in the user's cache directory)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check and write the configuration, but do not serve")
    parser.add_argument(
        "--skip-preflight", action="store_true", help="start without checking first (a cluster that grows on demand)"
    )


def run(args: argparse.Namespace) -> int:
    """Does not return when it serves: the process becomes `serve run`."""
    configuration = resolve(args.target, options_given(args), args.host, args.port)
    if not args.skip_preflight:
        check(configuration, find_machine())
    _warn_of_haproxy(configuration)
    path = configuration.file
    if path is None or configuration.changed or args.output is not None:
        path = _write(configuration, args.output)
        print(f"configuration: {path}")
    if args.dry_run:
        return 0
    _announce(configuration)
    argv, environment = command_line(path, os.environ)
    os.execve(argv[0], argv, environment)


def _warn_of_haproxy(configuration: Configuration) -> None:
    """A file written by hand may lack what HAProxy needs."""
    runtime_env = (configuration.document.get("controller_options") or {}).get("runtime_env") or {}
    if (fault := lost_settings({**os.environ, **(runtime_env.get("env_vars") or {})})) is not None:
        print(f"warning: {fault}", file=sys.stderr)


def command_line(path: Path, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """`serve run` of this Python, and its environment."""
    # The Makefile says why.
    ours = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_output_error_log_if_still_retry": "0",
    }
    environment = {**ours, **environ}
    if not environ.get("RAY_ADDRESS"):  # a cluster of its own, closed to other users of the machine
        environment.setdefault("RAY_AUTH_MODE", "token")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    return [sys.executable, "-m", "ray.serve.scripts", "run", str(path)], environment


def _write(configuration: Configuration, output: Path | None) -> Path:
    config = next(iter(configuration.applications.values()))
    path = output or _cache_directory() / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', config.models[0].name)}.yaml"
    text = yaml.dump(configuration.document, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=120)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER.format(path=path) + text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; set --output to a file that can be written"
        ) from None
    return path


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta" / "serve"


def _announce(configuration: Configuration) -> None:
    host, port = configuration.address
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    config = next(iter(configuration.applications.values()))
    name, key = config.models[0].name, ""
    if config.ingress.api_keys_file or config.ingress.api_key_hashes or _keys_in(os.environ):
        key = ' -H "Authorization: Bearer $MANTA_API_KEY"'
        print("API keys:      wanted; the commands below take one from MANTA_API_KEY")
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    print(f"address:       {url} (once a line says `open at`: 15 to 30 s for the built-in model on two cores)")
    print(f"try it:        manta chat --url {url}")
    print(
        f"               curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        flush=True,
    )


def _keys_in(environ: Mapping[str, str]) -> bool:
    return bool(environ.get(KEYS_VARIABLE) or environ.get(KEYS_FILE_VARIABLE))


class _PlainDumper(yaml.SafeDumper):
    """Writes shared parts out each time instead of as anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


COMMAND = Command("serve a model or a Serve configuration over HTTP", add_arguments, run)
