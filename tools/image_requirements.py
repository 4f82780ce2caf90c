"""Writes what the images install, each file with its hash: `python -m tools.image_requirements` (with `uv`, online)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "cluster/docker/requirements.txt"
PYTHON = "3.12"  # of the images
EXTRAS = ("tracing", "tokenizers", "audio")  # asked for by settings, not by who builds


def main() -> None:
    """Resolves what serving needs within constraints.txt and writes names, versions and hashes."""
    uv = shutil.which("uv") or sys.exit("image_requirements: needs uv; pip install uv")
    wanted = ["pyproject.toml", *(f"--extra={extra}" for extra in EXTRAS), "--constraint", "constraints.txt"]
    form = ["--universal", "--python-version", PYTHON, "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    subprocess.run([uv, "pip", "compile", *wanted, *form, "--output-file", str(OUT)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
