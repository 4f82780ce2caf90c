"""A proposer from outside of the tree: one file in a model's folder, and one line of the table."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from app.backends import PROPOSERS
from app.config.engine import EngineConfig
from app.records.worker_info import WorkerInfo
from app.worker.worker import Worker
from tests.worker.worker_driver import decode_statically

NAME, ENTRY = "prophet", "prophet_proposer:Prophet"
ASKED = {"method": NAME, "num_speculative_tokens": 3}
FILE = '''
"""Knows what each request will say, but lies at every fifth position."""

import json
from pathlib import Path

import torch

from app.worker.spec_decode.base import Proposer


class Prophet(Proposer):
    num_draft_tokens = 3

    def __init__(self):
        self.answers = json.loads(Path(__file__).with_name("answers.json").read_text())
        self.by_row = {}

    @classmethod
    def create(cls, context):
        return cls()

    def enter(self, row, request):
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        self.by_row[row] = prompt + self.answers.get(f"{request.spec.choice_index} {prompt}", [])

    def propose(self, proposal):
        known = proposal.columns.num_tokens
        return torch.tensor([self.drafts_of(row, int(known[row])) for row in proposal.rows.tolist()])

    def drafts_of(self, row, known):
        positions, said = range(known, known + self.num_draft_tokens), self.by_row[row]
        return [said[p] if p < len(said) and p % 5 else 3 for p in positions]

'''


def model_with_prophet(model: Path, folder: Path, answers: dict[str, list[int]]) -> Path:
    """A copy of the model's folder in which the proposer lies, too."""
    copied = folder / "model"
    shutil.copytree(model, copied, dirs_exist_ok=True)
    (copied / "prophet_proposer.py").write_text(FILE)
    (copied / "answers.json").write_text(json.dumps(answers))
    importlib.invalidate_caches()
    return copied


def key_of(choice_index: int, prompt: list[int]) -> str:
    return f"{choice_index} {prompt}"


class ProphetWorker(Worker):
    """A worker in a process of its own, where nobody has written the table's line yet."""

    def __init__(self, config: EngineConfig, *place: Any) -> None:
        sys.path.insert(0, config.model)
        PROPOSERS._table[NAME] = ENTRY
        super().__init__(config, *place)


class UnevenWorker(ProphetWorker):
    """A worker of a pipeline of which every second stage decodes over static tensors."""

    def start(self) -> WorkerInfo:
        info = super().start()
        if self._rank % 2:
            decode_statically(self, [1, 2, 4, 8])
        return info
