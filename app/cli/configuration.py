"""The Serve configuration that a command runs: a YAML, or a model; options on top; and where each value came from.

A model given by name or path becomes the document that a YAML would hold, so that a user can grow from one to the
other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.cli.options import Option, options_of
from app.config.admission import AdmissionConfig
from app.config.engine import MEANT_NULLS, EngineConfig
from app.config.ingress import IngressConfig
from app.config.model import ModelConfig
from app.config.router import RouterConfig
from app.config.serve import ServeConfig
from app.deployments.autoscaling import POLICY_FUNCTION
from app.deployments.serve.haproxy import ENVIRONMENT as HAPROXY_ENVIRONMENT
from app.deployments.serve.serve_args import parse_args
from app.errors import ConfigError

IMPORT_PATH = "app.deployments.app:build"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
MODEL_FILES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja"})
YamlPath = tuple[str | int, ...]  # keys and list positions from the root of the document

# Serve's high-throughput mode; configs/serve/quickstart.yaml says what each line is for, and a test holds them equal.
THROUGHPUT_MODE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    **HAPROXY_ENVIRONMENT,
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "134217728",
}

# Options by group, as paths into the `args:` of the application; model and engine options mean the only model.
SERVE_OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "model": tuple(options_of(ModelConfig, ("models", "0"), skip=("engine",))),
    "engine": tuple(options_of(EngineConfig, ("models", "0", "engine"), skip=("model",))),
    "ingress": tuple(options_of(IngressConfig, ("ingress",), "ingress-")),
    "router": tuple(options_of(RouterConfig, ("router",), "router-")),
    "admission": tuple(options_of(AdmissionConfig, ("admission",), "admission-")),
}


@dataclass(slots=True)
class Configuration:
    """A whole Serve document, the Manta applications in it, and the origin of each value that is no default."""

    document: dict[str, Any]
    file: Path | None  # the YAML it was read from
    applications: dict[int, ServeConfig] = field(default_factory=dict)  # by position in `applications`
    origins: dict[YamlPath, str] = field(default_factory=dict)
    changed: bool = False  # by options, or made from a model: the document is in no file yet

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that Serve listens on."""
        http = self.document.get("http_options") or {}
        host, port = http.get("host", DEFAULT_HOST), http.get("port", DEFAULT_PORT)
        if not isinstance(host, str) or not isinstance(port, int):
            raise ConfigError(f"{self.file}: http_options: expected a text as host and a number as port")
        return host, port

    def env_vars(self, index: int) -> dict[str, str]:
        """Environment that the application at `index` adds to its replicas'."""
        runtime_env = self.document["applications"][index].get("runtime_env") or {}
        return dict(runtime_env.get("env_vars") or {})

    def effective(self) -> dict[str, Any]:
        """The document with every option of Manta written out, but for those whose null says something else than
        nothing does."""
        document = copy.deepcopy(self.document)
        for index, config in self.applications.items():
            document["applications"][index]["args"] = args = config.model_dump(mode="json")
            for model, written in zip(config.models, args["models"], strict=True):
                for name in MEANT_NULLS - model.engine.model_fields_set:
                    del written["engine"][name]
        return document


def is_file(target: str) -> bool:
    """True if `target` means a YAML rather than a model."""
    return target.endswith((".yaml", ".yml")) or Path(target).is_file()


def resolve(target: str, options: Mapping[tuple[str, ...], Any], host: str | None, port: int | None) -> Configuration:
    """Works out what to run for a YAML or a model, with the given options on top. ConfigError names what is wrong, and
    where.
    """
    configuration = _from_file(Path(target)) if is_file(target) else _from_model(target)
    _set_http(configuration, host, port)
    if options:
        _overlay(configuration, options)
    for index, application in enumerate(configuration.document["applications"]):
        if application.get("import_path") == IMPORT_PATH:
            config = _parse(configuration, application.get("args") or {}, options)
            if any(model.autoscaling for model in config.models) and "autoscaling_policy" not in application:
                application["autoscaling_policy"] = {"policy_function": POLICY_FUNCTION}
                configuration.changed = True
            if configuration.changed:
                application["args"] = config.model_dump(mode="json", exclude_unset=True)
            configuration.applications[index] = config
    if not configuration.applications:
        raise ConfigError(f"{target}: no application has import_path {IMPORT_PATH}")
    return configuration


def _from_model(target: str) -> Configuration:
    """The document of a model on this machine."""
    path = Path(target).expanduser()
    model, name = (str(path.resolve()), path.resolve().name) if path.is_dir() else (target, Path(target).name)
    environment = {"env_vars": dict(THROUGHPUT_MODE)}
    document: dict[str, Any] = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": DEFAULT_HOST, "port": DEFAULT_PORT},
        "controller_options": {"runtime_env": environment},
        "applications": [
            {
                "name": "manta",
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "runtime_env": copy.deepcopy(environment),
                "args": {"models": [{"name": name, "engine": {"model": model}}]},
            }
        ],
    }
    root: YamlPath = ("applications", 0, "args", "models", 0)
    return Configuration(
        document, None, origins={(*root, "name"): "MODEL", (*root, "engine", "model"): "MODEL"}, changed=True
    )


def _from_file(path: Path) -> Configuration:
    """A YAML that holds a Serve configuration."""
    if path.suffix in MODEL_FILES:
        raise ConfigError(f"{path} is a file of a model: give the directory that holds it, {path.parent}")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give a Serve YAML or a model directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}; give a Serve YAML or a model directory") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{where}: bad YAML: {problem}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or not all(isinstance(each, dict) for each in applications):
        raise ConfigError(f"{path}: not a Serve configuration: `applications` must be a list (see configs/serve)")
    if not isinstance(document.get("http_options") or {}, dict):
        raise ConfigError(f"{path}: http_options: expected host and port")
    _check_environment(path, "controller_options", document.get("controller_options"))
    for index, application in enumerate(applications):
        _check_environment(path, f"applications.{index}", application)
    return Configuration(document, path, origins=dict.fromkeys(_leaves(document), "file"))


def _check_environment(path: Path, name: str, section: Any) -> None:
    """ConfigError where environment variables cannot be read; all else of a section is checked with Serve's schema."""
    for key in ("runtime_env", "env_vars", ""):
        section = section or {}
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name}: expected keys and values, not {section!r:.80}")
        name, section = f"{name}.{key}", section.get(key)


def _set_http(configuration: Configuration, host: str | None, port: int | None) -> None:
    for name, value in (("host", host), ("port", port)):
        if value is not None:
            http = configuration.document.get("http_options") or {}
            configuration.document["http_options"] = {**http, name: value}
            configuration.origins["http_options", name] = f"option --{name}"
            configuration.changed = True


def _overlay(configuration: Configuration, options: Mapping[tuple[str, ...], Any]) -> None:
    """Put options into the only Manta application; those of a model into its only model."""
    document, flags = configuration.document, _flags()
    places = [i for i, each in enumerate(document["applications"]) if each.get("import_path") == IMPORT_PATH]
    first = flags[next(iter(options))]
    if len(places) != 1:
        raise ConfigError(
            f"{first}: {configuration.file} holds {len(places)} Manta applications; write it into the file"
        )
    args = document["applications"][places[0]].setdefault("args", {})
    models = args.get("models") if isinstance(args, dict) else None
    if not isinstance(models, list) or len(models) != 1 or not isinstance(models[0], dict):
        raise ConfigError(f"{first}: {configuration.file} has not exactly one model; write the option into the file")
    for path, value in options.items():
        keys: YamlPath = tuple(int(key) if key.isdigit() else key for key in path)
        node: Any = args
        for key in keys[:-1]:
            node = node[key] if isinstance(key, int) else node.setdefault(key, {})
            if not isinstance(node, dict | list):
                raise ConfigError(f"{configuration.file}: args.{'.'.join(path[:-1])}: expected options, not {node!r}")
        node[keys[-1]] = value
        configuration.origins["applications", places[0], "args", *keys] = f"option {flags[path]}"
    configuration.changed = True


def _parse(configuration: Configuration, args: Any, options: Mapping[tuple[str, ...], Any]) -> ServeConfig:
    """`args` checked; an error names the flag where the value came from one, else the path in the file."""
    where = f"{configuration.file}: " if configuration.file else ""
    if not isinstance(args, dict):
        raise ConfigError(f"{where}args: expected options, not {args!r}")
    try:
        return parse_args(args)
    except ConfigError as error:
        lines = [_line(line, where, options) for line in error.message.splitlines()]
        raise ConfigError("\n".join(lines)) from None


def _line(line: str, where: str, options: Mapping[tuple[str, ...], Any]) -> str:
    flags = _flags()
    line = line.replace("Value error, ", "", 1)
    if " (given: {" in line:  # a check of several options together: the message says which
        line = line[: line.index(" (given: {")]
    for path in options:
        start = f"args.{'.'.join(path)}:"
        if line.startswith(start):
            return flags[path] + line[len(start) - 1 :]
    return where + line


def _flags() -> dict[tuple[str, ...], str]:
    return {option.path: option.flag for group in SERVE_OPTIONS.values() for option in group}


def _leaves(node: Any, place: YamlPath = ()) -> list[YamlPath]:
    """Places of all values that are neither a mapping nor a list of mappings."""
    if isinstance(node, dict) and node:
        return [leaf for key, value in node.items() for leaf in _leaves(value, (*place, key))]
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        return [leaf for index, item in enumerate(node) for leaf in _leaves(item, (*place, index))]
    return [place]
