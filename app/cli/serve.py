"""`manta serve`: check, write the Serve configuration that is to run, and become the process that deploys it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.cli.cluster import auth_mode, cluster_address
from app.cli.command import Command
from app.cli.configuration import Configuration, resolve
from app.cli.deployment import DASHBOARD
from app.cli.machine import Machine, find_machine
from app.cli.preflight import check
from app.cli.ray_settings import RAY_SETTINGS
from app.cli.serve_ports import choose_ports
from app.cli.serve_schema import check_schema
from app.cli.target import add_target, options_given
from app.config.ingress import KEYS_FILE_VARIABLE, KEYS_VARIABLE
from app.deployments.serve.haproxy import lost_settings
from app.engine.executor import own_ray
from app.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent  # the package's: replicas must be able to import it
HEADER = "# Written by `manta serve`; all options and their meaning: `manta serve --help`. Run it: manta serve {path}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target and options, and what to do with the configuration."""
    add_target(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="where to write the configuration (default: a file in the user's cache directory)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="write over the file of --output")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check and write the configuration, but do not serve; what this machine lacks for it becomes a note",
    )  # fmt: skip
    parser.add_argument(
        "--skip-preflight", action="store_true", help="start without checking first (a cluster that grows on demand)"
    )
    parser.add_argument(
        DASHBOARD, action="store_true",
        help="start Ray's dashboard too, which `serve status` and `ray list` ask (1.5 %% of a core, 0.25 GiB); a "
        "cluster that is joined has its own",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Does not return when it serves: the process becomes `app.cli.deployment`."""
    configuration = resolve(args.target, options_given(args), args.host, args.port)
    machine = None if args.skip_preflight else find_machine()
    if machine is not None:
        _prepare(configuration, machine, args.dry_run)
    _warn_of_haproxy(configuration)
    path = configuration.file
    is_written = path is None or configuration.changed or args.output is not None
    if machine is not None and path is not None and (is_written or args.dry_run):
        check_schema(configuration.document, path)  # else the process that serves, which imports Serve anyway
    if path is None or is_written:
        path = _write(configuration, args.output, args.force)
        print(f"configuration: {path}")
    if args.dry_run:
        print(f"{path}: {'not checked' if machine is None else 'no mistake found'}; nothing is started (--dry-run)")
        return 0
    if machine is None:
        address = cluster_address()
    else:
        address = machine.cluster.address if machine.cluster else None
    _announce(configuration, address, has_dashboard=args.dashboard or address is not None)
    argv, environment = command_line(path, os.environ, address, args.dashboard)
    os.execve(argv[0], argv, environment)


def _prepare(configuration: Configuration, machine: Machine, dry_run: bool) -> None:
    """Check, and choose what may be chosen; a dry run only tells what `machine` lacks, as another may run the file."""
    if dry_run:
        check(configuration, machine, lambda line: print(f"note: {line}", file=sys.stderr))
        return
    if machine.cluster is None and (chosen := choose_ports(configuration)):
        ports = ", ".join(f"{name}={port}" for name, port in chosen.items())
        print(f"Serve's ports: {ports} (those by default are taken, likely by another Serve)")
    check(configuration, machine)


def _warn_of_haproxy(configuration: Configuration) -> None:
    """Warn where a file written by hand lacks what HAProxy needs."""
    runtime_env = (configuration.document.get("controller_options") or {}).get("runtime_env") or {}
    if (fault := lost_settings({**os.environ, **(runtime_env.get("env_vars") or {})})) is not None:
        print(f"warning: {fault}", file=sys.stderr)


def command_line(
    path: Path, environ: Mapping[str, str], address: str | None = None, dashboard: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that deploys `path` on the Ray cluster at `address`, or on one of its own (with Ray's
    `dashboard`, if that is wanted), and its environment.
    """
    own = {} if address else RAY_SETTINGS
    environment = {"RAY_USAGE_STATS_ENABLED": "0", **own_ray.SETTINGS, **own, **environ}
    mode = auth_mode(environ) if address else environ.get("RAY_AUTH_MODE", "token")  # closed to others of the machine
    if mode is not None:
        environment["RAY_AUTH_MODE"] = mode
    environment["RAY_ADDRESS"] = address or "local"  # Ray would look for a cluster in its own, slower way
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    argv = [sys.executable, "-m", "app.cli.deployment", str(path), *([DASHBOARD] if dashboard else [])]
    return argv, environment


def _write(configuration: Configuration, output: Path | None, force: bool) -> Path:
    config = next(iter(configuration.applications.values()))
    path = output or _cache_directory() / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', config.models[0].name)}.yaml"
    text = yaml.dump(configuration.document, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=120)
    text = HEADER.format(path=path) + text
    try:
        if output is not None and not force and output.exists() and output.read_bytes() != text.encode():
            raise ConfigError(f"--output: {output} exists, with other content: name another file, or add --force")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; set --output to a file that can be written"
        ) from None
    return path


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta" / "serve"


def _announce(configuration: Configuration, address: str | None, has_dashboard: bool) -> None:
    host, port = configuration.address
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    config = next(iter(configuration.applications.values()))
    name, key = config.models[0].name, ""
    if config.ingress.api_keys_file or config.ingress.api_key_hashes or _keys_in(os.environ):
        key = ' -H "Authorization: Bearer $MANTA_API_KEY"'
        print("API keys:      wanted; the commands below take one from MANTA_API_KEY")
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    print(f"address:       {url} (once a line says `open at`: 15 to 30 s for the built-in model on two cores)")
    if address is not None:
        print(f"Ray cluster:   {address}, joined; its Serve updates the applications that the configuration names")
    tool = f"{_script('serve')} status" if has_dashboard else f"{_script('ray')} status"
    print(f"Ray's tools:   RAY_AUTH_MODE=token {tool} (the token is in ~/.ray/auth_token)")
    print(f"try it:        {_script('manta')} chat --url {url}")
    print(
        f"               curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        flush=True,
    )


def _script(name: str) -> str:
    """A command of this Python's environment, so that it can be pasted into a shell that has not activated it."""
    file = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and Path(found).resolve() == file.resolve():
        return name
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _keys_in(environ: Mapping[str, str]) -> bool:
    return bool(environ.get(KEYS_VARIABLE) or environ.get(KEYS_FILE_VARIABLE))


class _PlainDumper(yaml.SafeDumper):
    """Writes shared parts out each time instead of as anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never write anchors."""
        return True


COMMAND = Command("serve a model or a Serve configuration over HTTP", add_arguments, run)
