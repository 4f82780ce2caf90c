"""How a step is run: from a static step, by which key, or as any other."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from app.records.step import SchedulerOutput
from app.worker.cascade_choice import CascadeChoice
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.static_step import CASCADE, LONG, MOST_EMPTY, Static, StepKey
from app.worker.heads.base import Head
from app.worker.model_runner import ModelRunner
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import NO_PARTS, WorkerFeatures


class Captured:
    """Keys of so many rows, with these parts, by their places for drafts."""

    def __init__(self, sizes: dict[int, Iterable[int]], parts: Iterable[frozenset[str]] = (NO_PARTS,)) -> None:
        self.is_long = False
        self.keys = [StepKey(size, part, count) for count in sizes for size in sizes[count] for part in parts]
        self.step = SimpleNamespace(places_each=lambda key: 1 + key.drafts, is_long=lambda rows: self.is_long)

    def key_for(self, num_rows: int, parts: frozenset[str], drafts: int = 0) -> StepKey | None:
        serving = [key for key in self.keys if key.size >= num_rows and key.drafts >= drafts and key.parts == parts]
        return min(serving, key=lambda key: (key.drafts, key.size), default=None)


def key_for(
    captured: Captured,
    counts: list[int],
    drafts: list[int] | None = None,
    *,
    num_proposed: int = 0,
    samples: bool = True,
    parts: frozenset[str] = NO_PARTS,
    is_ordinary: bool = False,
    shares: bool | None = None,
) -> StepKey | None:
    """The key of a step of rows with so many tokens; `shares`: whether decodes share enough (None: nobody looks)."""
    features = SimpleNamespace(are_ordinary=lambda rows: is_ordinary, parts_of=lambda rows: parts)
    cascade = None if shares is None else SimpleNamespace(wanted=lambda rows: shares)
    runner = ModelRunner(
        cast("ForwardPass", None), cast("RowState", SimpleNamespace(device=torch.device("cpu"))), cast("Head", None),
        cast("WorkerFeatures", features), cast("CascadeChoice | None", cascade), cast("Static", captured),
    )  # fmt: skip
    rows = np.arange(len(counts))
    step = SchedulerOutput(
        1, rows.astype(np.int32), np.array(counts, np.int32), np.full(len(counts), samples), num_proposed=num_proposed
    )
    step.num_draft_tokens = None if drafts is None else np.array(drafts, np.int32)
    return runner._key_for(step, rows, cast("Static", captured))


SIZES: dict[int, Any] = {0: (1, 4, 8, 256), 3: (1, 4, 8, 256)}


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 4), (8, 8), (9, 256), (257, None)])
def test_decodes_take_the_smallest_step_that_holds_them(num_rows: int, size: int | None) -> None:
    assert key_for(Captured(SIZES), [1] * num_rows) == (None if size is None else StepKey(size))


def test_prompts_and_rows_that_do_not_sample_take_none() -> None:
    assert key_for(Captured(SIZES), [1, 5]) is None
    assert key_for(Captured(SIZES), [1, 1], samples=False) is None
    assert key_for(Captured(SIZES), [1, 1], is_ordinary=True) is None


def test_drafts_take_a_step_with_places_for_them() -> None:
    assert key_for(Captured(SIZES), [4, 2, 1], [3, 1, 0]) == StepKey(4, NO_PARTS, 3)
    assert key_for(Captured({0: (4,)}), [4, 2, 1], [3, 1, 0]) is None
    assert key_for(Captured(SIZES), [5, 3], [3, 1]) is None  # one of them has a prompt's tokens besides


def test_rows_that_are_left_with_drafts_take_the_step_that_proposes_them() -> None:
    captured = Captured(SIZES)
    assert key_for(captured, [1, 1], num_proposed=3) == StepKey(4, NO_PARTS, 3)
    assert key_for(captured, [1, 1], num_proposed=0) == StepKey(4)
    assert key_for(captured, [1, 1], num_proposed=5) == StepKey(4)  # none has so many places: proposed behind it
    assert key_for(captured, [2, 1], [1, 0], num_proposed=5) == StepKey(4, NO_PARTS, 3)


def test_a_wide_step_is_not_run_nearly_empty() -> None:
    """With room for drafts that nobody has, beyond what is not worth it."""
    assert 256 * 4 - 9 > MOST_EMPTY >= 256 * 4 - 4 * 256
    assert key_for(Captured(SIZES), [1] * 9, num_proposed=3) == StepKey(256)
    assert key_for(Captured(SIZES), [4] * 9, [3] * 9) is None
    assert key_for(Captured(SIZES), [4] * 256, [3] * 256) == StepKey(256, NO_PARTS, 3)


def test_shared_prefixes_are_read_once_where_that_is_captured_and_wanted() -> None:
    captured = Captured({0: (4,)}, [NO_PARTS, frozenset({CASCADE})])
    assert key_for(captured, [1, 1], shares=True) == StepKey(4, frozenset({CASCADE}))
    assert key_for(captured, [1, 1], shares=False) == StepKey(4)
    assert key_for(Captured({0: (4,)}), [1, 1], shares=True) == StepKey(4)


def test_a_long_row_takes_its_own_step_if_there_is_one() -> None:
    captured = Captured(SIZES, [NO_PARTS, frozenset({LONG})])
    assert key_for(captured, [1]) == StepKey(1)
    captured.is_long = True
    assert key_for(captured, [1]) == StepKey(1, frozenset({LONG}))
    assert key_for(captured, [4], [3]) == StepKey(1, NO_PARTS, 3)  # drafts make several tokens of it
    captured.keys = [StepKey(1)]
    assert key_for(captured, [1]) == StepKey(1)


def test_long_rows_that_share_a_prefix_read_it_once() -> None:
    """Which is done layer by layer, as is wanted of long rows; where that is not captured, each reads it for itself."""
    shared, long = frozenset({CASCADE}), frozenset({LONG})
    captured = Captured({0: (4,)}, [NO_PARTS, shared, long])
    captured.is_long = True
    assert key_for(captured, [1] * 4, shares=True) == StepKey(4, shared)
    assert key_for(captured, [1] * 4, shares=False) == StepKey(4, long)
    captured.keys = [StepKey(4), StepKey(4, long)]
    assert key_for(captured, [1] * 4, shares=True) == StepKey(4, long)


def test_rows_take_the_step_with_their_parts() -> None:
    parts = frozenset({"adapters"})
    captured = Captured(SIZES, [NO_PARTS, parts])
    assert key_for(captured, [1], parts=parts) == StepKey(1, parts)
    assert key_for(captured, [4], [3], parts=parts, shares=True) == StepKey(1, parts, 3)
    assert key_for(Captured(SIZES), [1], parts=parts) is None
