"""What the code may not do, whoever asks: read over all of app/, so that a new file cannot be forgotten."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "app").rglob("*.py"))

# Between one driver and its own workers, which have shown each other the secret (worker_group/rendezvous.py) or share a
# pipe. Nothing that a client sends comes here.
MAY_UNPICKLE = {
    "engine/executor/worker_group_executor.py",
    "engine/executor/local_processes.py",
    "engine/executor/local_worker.py",
    "engine/executor/worker_group/group.py",
    "engine/executor/worker_group/signals.py",
    "engine/executor/worker_group/worker_actor.py",
    "kernels/compile_processes.py",  # of a worker and processes that were forked of it
    "loading/load_formats/pt.py",  # the name of an error; it loads tensors only, see test_no_text_becomes_code
}
# What a command of the user's own asks, the address that this server itself announces, a driver of its workers, an
# ingress of its engine replicas, which show it that they know the cluster's secret, the hub
# that the operator names a model of or repositories of adapters on, and hosts of pictures that the operator names.
MAY_CONNECT = {
    "cli/check_determinism.py",
    "cli/cluster.py",
    "cli/server_queries.py",
    "cli/stream_client.py",
    "cli/batch/transport.py",
    "deployments/channel/direct_connection.py",
    "deployments/ingress/announcement.py",
    "engine/executor/worker_group/rendezvous.py",
    "checkpoints/hub.py",
    "checkpoints/adapters/hub_resolver.py",
    "media/fetching.py",
}
READS_OBJECTS = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
CONNECTS = ("urllib.request", "http.client", "httpx", "httpx2", "requests", "aiohttp", "ftplib", "smtplib")
RUNS_CODE = {"eval", "exec", "__import__", "torch.load", "os.system", "os.popen", "numpy.load", "np.load"}
TRUSTING = ("shell", "trust_remote_code", "allow_pickle")
RUNS_CODE |= {"yaml.load", "yaml.unsafe_load", "jinja2.Environment", "jinja2.Template", "tempfile.mktemp"}
# A launch is written out from the names of a kernel's own parameters, which stand in app/kernels.
MAY_RUN_CODE = {("kernels/quick_launch.py", "exec")}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _name(path: Path) -> str:
    return path.relative_to(ROOT / "app").as_posix()


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _importers(modules: tuple[str, ...]) -> set[str]:
    trees = {_name(path): _tree(path) for path in FILES}
    return {name for name, tree in trees.items() for found in _imports(tree) if found in modules}


def test_objects_are_read_only_between_a_driver_and_its_workers() -> None:
    assert _importers(READS_OBJECTS) == MAY_UNPICKLE


def test_nothing_that_serves_requests_opens_a_connection() -> None:
    connects = {
        _name(path)
        for path in FILES
        for name, _ in _calls(_tree(path))
        if name.endswith(("create_connection", "open_connection"))
    }
    assert _importers(CONNECTS) | connects <= MAY_CONNECT


def test_no_text_becomes_code() -> None:
    found = []
    for path in FILES:
        for name, call in _calls(_tree(path)):
            trusting = [keyword for keyword in call.keywords if keyword.arg in TRUSTING and _is_true(keyword.value)]
            tensors_only = any(keyword.arg == "weights_only" and _is_true(keyword.value) for keyword in call.keywords)
            if (_name(path), name) in MAY_RUN_CODE:
                continue
            if (name in RUNS_CODE and not (name == "torch.load" and tensors_only)) or trusting:
                found.append(f"{_name(path)}:{call.lineno}: {name}")
    assert found == []


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_the_walk_finds_what_it_looks_for() -> None:
    tree = ast.parse("import pickle\nfrom urllib import request\nx = eval(y)\nsubprocess.run(z, shell=True)")
    assert {"pickle", "urllib.request"} <= set(_imports(tree))
    assert {"eval", "subprocess.run"} == {name for name, _ in _calls(tree)}


def test_shipped_files_close_ray_by_its_token() -> None:
    """Ray's RPC unpickles what reaches it: whatever starts a cluster asks for the token."""
    assert "RAY_AUTH_MODE ?= token" in (ROOT / "Makefile").read_text()
    assert 'environ.get("RAY_AUTH_MODE", "token")' in (ROOT / "app/cli/serve.py").read_text()
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        text = path.read_text()
        assert "RAY_AUTH_MODE: disabled" not in text, path


def test_json_that_cannot_fail() -> None:
    """Starlette's own response raises at an unpaired surrogate, and at NaN: app/api/http/json_response.py does not."""
    wrong = [
        _name(path)
        for path in FILES
        for name in _imports(_tree(path))
        if name.endswith(".JSONResponse") and not name.startswith("app.")
    ]
    assert wrong == []
