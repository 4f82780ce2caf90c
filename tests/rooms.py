"""The rooms of the house in the order of the plan (design 3): who stands above whom.

A row is a tuple of cells, a cell a tuple of rooms, a room a folder, by the module name that begins the names of what it
holds; the longest name that fits decides, and `app` holds the files of app/ itself. A file may import from its own
room, from all cells above its own, and from no other: rooms of one cell do not know each other.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for path in (ROOT / "app").rglob("*.py") if "assets" not in path.parts)

ROWS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        # The ground floor: the files of app/ itself, and what every room may need.
        ("app",),
        ("app.telemetry",),
        ("app.config",),
    ),
    (
        # Devices and kernels: torch and Triton.
        ("app.platforms",),
        ("app.kernels",),
        ("app.kernels.attention", "app.kernels.rows", "app.kernels.sampling"),
        ("app.kernels.drafts", "app.kernels.fused", "app.kernels.mla", "app.kernels.recurrent"),
        ("app.kernels.gemm",),
        ("app.kernels.moe", "app.kernels.lora"),
        ("app.kernels.whole_step",),
    ),
    (
        # The host half: no torch (I8).
        ("app.checkpoints", "app.structured"),
        ("app.records",),
        ("app.media",),
        ("app.text", "app.beams", "app.engine.kv_connector"),
        ("app.engine.kv_cache",),
        ("app.engine.scheduler",),
    ),
    (
        # The device half.
        ("app.distributed", "app.checkpoints.tensors"),
        ("app.quantization",),
        ("app.layers",),
        ("app.models",),
        ("app.models.families",),
        ("app.models.multimodal",),
        ("app.models.drafters",),
        ("app.loading",),
        ("app.worker.rows", "app.worker.attention"),
        ("app.worker.logits_processors", "app.worker.pooling", "app.worker.spec_decode"),
        ("app.worker.sampling",),
        ("app.worker",),
    ),
    (
        # The engine: what joins both halves.
        ("app.engine.executor",),
        ("app.engine",),
    ),
    (
        # The API: no torch, no Ray.
        ("app.parsers", "app.api.http", "app.api.store"),
        ("app.api",),
        ("app.api.generation",),
        ("app.api.chat", "app.api.idempotency"),
        ("app.api.openai", "app.api.anthropic", "app.api.pooling", "app.api.batches", "app.api.pages"),
        ("app.api.server",),
        ("app.api.admin",),
    ),
    (
        # The entry points.
        ("app.offline", "app.deployments.process", "app.deployments.routing"),
        ("app.quantize",),
        ("app.deployments.channel",),
        ("app.deployments.autoscaling", "app.deployments.admin", "app.deployments.serve"),
        ("app.deployments.router",),
        ("app.deployments.ingress", "app.deployments.replica"),
        ("app.deployments",),
        ("app.cli",),
        ("app.converters",),
    ),
)

FACE = "app.__init__"  # the package's own file, which hands out what users import, knows all rooms
PLACES = {name: (row, cell) for row, cells in enumerate(ROWS) for cell, rooms in enumerate(cells) for name in rooms}
PLACES[FACE] = (len(ROWS), 0)


def module_of(path: Path) -> str:
    """Name of the module in a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room a module belongs to."""
    if module == "app":
        return FACE
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


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules that a file imports, wherever it does so; relative imports are none of ours."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return frozenset(found)
