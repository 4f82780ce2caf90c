"""The rooms of the house in the order of the plan (design 3): who stands above whom.

A row is a tuple of cells, a cell a tuple of rooms, a room a module name that begins the names of what it holds; the
longest name that fits decides. A file may import from its own room, from all cells above its own, and from no other:
rooms of one cell do not know each other.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for path in (ROOT / "app").rglob("*.py") if "assets" not in path.parts)

ROWS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("app.errors", "app.bounds", "app.frozen", "app.heap"),
        ("app.plugins",),
        ("app.registry", "app.telemetry"),
        (
            "app.backends",
            "app.parser_tables",
            "app.admission_config",
            "app.admin_config",
            "app.autoscaling_config",
            "app.slo_config",
        ),
        ("app.router_config",),
        ("app.config",),
    ),
    (("app.platforms",), ("app.kernels",)),
    (
        # Records: what requests, steps and results consist of.
        ("app.engine",),
        ("app.text", "app.beams", "app.engine.structured"),
        ("app.engine.scheduler.request", "app.engine.kv_cache.block_hash"),
        ("app.engine.kv_cache.kv_events", "app.engine.kv_cache.block_residency"),
        ("app.engine.kv_connector",),
        ("app.engine.stats", "app.engine.kv_cache"),
        ("app.engine.scheduler",),
    ),
    (
        ("app.engine.to_device", "app.engine.distributed", "app.engine.quantization"),
        ("app.engine.layers",),
        ("app.engine.attention", "app.engine.models"),
        ("app.engine.sampling.logprobs",),
        ("app.engine.worker.row_state",),
        ("app.engine.worker.input_batch", "app.engine.worker.pending_step"),
        ("app.engine.row_feature",),
        ("app.engine.logits_processors", "app.engine.pooling", "app.engine.spec_decode"),
        ("app.engine.sampling",),
        ("app.engine.worker",),
    ),
    (
        ("app.engine.executor.worker_group",),
        ("app.engine.executor.transports",),
        ("app.engine.executor",),
        ("app.engine.core",),
        ("app.engine.control",),
        ("app.engine.async_engine",),
    ),
    (
        ("app.api.engine_client",),
        ("app.api.parsers", "app.api.store"),
        ("app.api",),
        ("app.api.chat", "app.api.idempotency"),
        ("app.api.openai", "app.api.anthropic", "app.api.pooling", "app.api.batches", "app.api.pages"),
        ("app.api.debug", "app.api.fleet", "app.api.app", "app.api.admin"),
    ),
    (
        ("app.deployments.channel.wire", "app.deployments.start_errors", "app.deployments.serve_logs", "app.offline"),
        ("app.deployments.routing", "app.quantize"),
        ("app.deployments.channel",),
        ("app.deployments.routing.router",),
        ("app.deployments",),
        ("app.cli",),
        ("app",),
    ),
)

# Files that stand with the records, although their room is further down: what a request asks of it.
RECORDS = (
    "app.engine.pooling.params",
    "app.engine.pooling.info",
    "app.engine.structured.structured_outputs",
    "app.engine.structured.reasoning",
)

PLACES = {name: (row, cell) for row, cells in enumerate(ROWS) for cell, rooms in enumerate(cells) for name in rooms}


def module_of(path: Path) -> str:
    """Name of the module in a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room a module belongs to."""
    if module in RECORDS:
        return "app.engine"
    while module not in PLACES:
        module = module.rpartition(".")[0]
    return module


def row_of(module: str) -> int:
    """The row of a module's room."""
    return PLACES[room_of(module)][0]


def may_import(module: str, other: str) -> bool:
    """Whether the plan lets `module` know `other`. The host half (row 2) stays free of the kernels (row 1)."""
    here, there = room_of(module), room_of(other)
    if PLACES[here][0] == 2 and PLACES[there][0] == 1:
        return False
    return here == there or PLACES[there] < PLACES[here]


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, wherever it does so; relative imports are none of ours."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found
