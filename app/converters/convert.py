"""`manta convert`: a configuration of Ray Serve LLM (`build_openai_app`, LLMConfig) as one of Manta.

Nothing is left out silently: each field that has no counterpart is named on standard error, with what to do instead.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from app.cli.command import Command
from app.cli.configuration import IMPORT_PATH, THROUGHPUT_MODE
from app.converters.serve_llm_fields import ENGINE_KWARGS, LLM_CONFIG, SERVING_ARGS, Converted, Rule
from app.deployments.autoscaling import POLICY_FUNCTION
from app.deployments.serve.serve_args import parse_args
from app.errors import ConfigError

BUILDER = "ray.serve.llm:build_openai_app"
HEADER = (
    "# Made by `manta convert` of {source}. Serve it: manta serve FILE; what the options mean: manta serve --help.\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and where to write."""
    parser.add_argument(
        "file", type=Path, help="Serve YAML with build_openai_app, or YAML of llm_configs or an LLMConfig"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write (default: standard output)")
    parser.add_argument("--force", action="store_true", help="write over the file of --output")


def run(args: argparse.Namespace) -> int:
    """Write the configuration, and name what it could not take over."""
    document, remarks = convert(args.file)
    text = HEADER.format(source=args.file.name)
    text += yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    if args.output is None:
        print(text, end="")
    else:
        _write(args.output, text, args.force)
    for remark in remarks:
        print(f"manta: {remark}", file=sys.stderr)
    return 0


def convert(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The Serve document of Manta, and a line for each field that has no counterpart or asks for a look. ConfigError
    where `path` holds none of the forms, or where what comes of it is no configuration of Manta."""
    document = _read(path)
    remarks: list[str] = []
    if "applications" not in document:
        converted = _application(
            {"name": "manta", "route_prefix": "/", "args": _serving_args(document, path)}, path, remarks
        )
        return _around({}, [converted]), remarks
    applications = document["applications"]
    if not isinstance(applications, list) or not all(isinstance(each, dict) for each in applications):
        raise ConfigError(f"{path}: applications: expected a list of applications")
    if not any(each.get("import_path") == BUILDER for each in applications):
        raise ConfigError(f"{path}: no application has import_path {BUILDER}")
    made = []
    for each in applications:
        if each.get("import_path") == BUILDER:
            made.append(_application(each, path, remarks))
        else:
            made.append(each)
            remarks.append(f"applications: {each.get('name')}: taken as it is ({each.get('import_path')})")
    return _around(document, made), remarks


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: bad YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a Serve configuration, llm_configs, or an LLMConfig")
    return document


def _serving_args(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """The arguments of build_openai_app: as they are, or with the only LLMConfig that the file holds."""
    if "llm_configs" in document:
        return document
    if "model_loading_config" in document:
        return {"llm_configs": [document]}
    raise ConfigError(f"{path}: none of applications, llm_configs and model_loading_config is in it")


def _around(document: dict[str, Any], applications: list[dict[str, Any]]) -> dict[str, Any]:
    """The Serve document, in high-throughput mode."""
    environment = {"runtime_env": {"env_vars": dict(THROUGHPUT_MODE)}}
    plain = {"proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0", "port": 8000}}
    return {**plain, **document, "controller_options": environment, "applications": applications}


def _application(application: dict[str, Any], path: Path, remarks: list[str]) -> dict[str, Any]:
    """One application, with all models of its llm_configs."""
    arguments = application.get("args") or {}
    configs = arguments.get("llm_configs")
    if not isinstance(configs, list) or not configs:
        raise ConfigError(f"{path}: args.llm_configs: expected a list of configurations, one a model")
    common = Converted()
    models = []
    for index, config in enumerate(configs):
        one = _model(_loaded(config, path), f"llm_configs[{index}]", remarks)
        models.append({**one.model, "engine": one.engine})
        _join(common, one)
    rest = {key: value for key, value in arguments.items() if key != "llm_configs"}
    _take(rest, SERVING_ARGS, common, "args", remarks)
    args: dict[str, Any] = {"models": models}
    if common.limits:
        common.ingress["limits"] = common.limits
    args |= {name: section for name in ("ingress", "router") if (section := getattr(common, name))}
    _check(args, path)
    for key in sorted(application.keys() - {"name", "route_prefix", "import_path", "args", "runtime_env"}):
        remarks.append(f"{key}: of the application {application.get('name')}: not taken over; its deployments differ")
    scales = any("autoscaling" in model for model in models)
    return {
        "name": application.get("name", "manta"),
        "route_prefix": application.get("route_prefix", "/"),
        "import_path": IMPORT_PATH,
        **({"autoscaling_policy": {"policy_function": POLICY_FUNCTION}} if scales else {}),
        "runtime_env": _environment(application, common.env_vars),
        "args": args,
    }


def _loaded(config: Any, path: Path) -> dict[str, Any]:
    """A configuration, or the file beside `path` that holds it."""
    if isinstance(config, str):
        return _read(path.parent / config)
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: llm_configs: expected configurations or paths, not {config!r}")
    return config


def _model(config: dict[str, Any], where: str, remarks: list[str]) -> Converted:
    converted = Converted()
    loading = config.get("model_loading_config")
    if not isinstance(loading, dict) or not isinstance(loading.get("model_id"), str):
        raise ConfigError(f"{where}: model_loading_config.model_id: this field is required")
    # The source is by default the id, and is read behind it.
    loading = {"model_id": loading["model_id"], "model_source": loading["model_id"], **loading}
    engine_kwargs = config.get("engine_kwargs") or {}
    _take({**config, "model_loading_config": loading, "engine_kwargs": None}, LLM_CONFIG, converted, where, remarks)
    _take(engine_kwargs, ENGINE_KWARGS, converted, f"{where}.engine_kwargs", remarks)
    return converted


def _take(
    values: Mapping[str, Any], table: Mapping[str, Rule], converted: Converted, where: str, remarks: list[str]
) -> None:
    """Apply each field's rule; what the table does not hold has no counterpart."""
    for path, value in _fields(values, table, ()):
        rule = table.get(path)
        remark = rule(value, converted) if rule else "has no counterpart"
        if remark:
            remarks.append(f"{where}.{path}: {remark}")


def _fields(values: Mapping[str, Any], table: Mapping[str, Rule], above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """(path, value) of each field that is given, as deep as the table goes."""
    for key, value in values.items():
        path = ".".join((*above, str(key)))
        if isinstance(value, Mapping) and any(name.startswith(f"{path}.") for name in table):
            yield from _fields(value, table, (*above, str(key)))
        elif value is not None:
            yield path, value


def _join(common: Converted, one: Converted) -> None:
    """Merges what several models say of the application: the largest number, the last name."""
    for section in ("ingress", "limits", "router", "env_vars"):
        mine, theirs = getattr(common, section), getattr(one, section)
        for key, value in theirs.items():
            mine[key] = max(mine.get(key, value), value) if isinstance(value, int | float) else value


def _environment(application: dict[str, Any], env_vars: dict[str, str]) -> dict[str, Any]:
    environment = copy.deepcopy(application.get("runtime_env") or {})
    environment["env_vars"] = {**(environment.get("env_vars") or {}), **env_vars, **THROUGHPUT_MODE}
    return environment


def _check(args: dict[str, Any], path: Path) -> None:
    try:
        parse_args(args)
    except ConfigError as error:
        raise ConfigError(f"{path}: what comes of it is no configuration of Manta:\n{error.message}") from None


def _write(output: Path, text: str, force: bool) -> None:
    if output.exists() and not force and output.read_text() != text:
        raise ConfigError(f"--output: {output} exists, with other content: name another file, or add --force")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None


COMMAND = Command("turn a configuration of Ray Serve LLM into one of Manta", add_arguments, run)
