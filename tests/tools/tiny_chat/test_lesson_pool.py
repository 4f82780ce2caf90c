"""The pool of lessons: those of a queue come into it, the last ones stay."""

from __future__ import annotations

import queue
import threading

import numpy as np
import torch

from tests.limits import wait_until
from tools.tiny_chat.lesson_pool import LessonPool


def test_the_last_examples_stay() -> None:
    pool = LessonPool(6, (((2,), torch.int16), ((), torch.bool)), "cpu")
    source: queue.Queue[tuple[np.ndarray, np.ndarray]] = queue.Queue()
    for first in (0, 4, 8):
        rows = np.arange(first, first + 4, dtype=np.int16)
        source.put((np.stack((rows, -rows), 1), rows % 2 == 0))
    threading.Thread(target=pool.fill, args=(source,), daemon=True).start()
    # Four, the two that are left room for, four that go over the first.
    wait_until(lambda: pool.made == 10, "all examples")
    pool.is_over = True
    assert pool.parts[0][:, 0].tolist() == [8, 9, 10, 11, 4, 5]
    both, is_even = pool.sample(5)
    assert (both[:, 0] == -both[:, 1]).all()
    assert torch.equal(is_even, both[:, 0] % 2 == 0)
