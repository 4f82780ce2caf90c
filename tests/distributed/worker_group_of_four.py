"""What each of four ranks (2 stages x 2) does in test_parallel_groups.py; light to import, because every rank does."""

from __future__ import annotations

from multiprocessing.queues import Queue
from typing import Any

import torch

from app.distributed.parallel_groups import RankGroup
from app.distributed.process_groups import connect_store, join_groups, leave_groups
from app.distributed.stage_link import StageLink

CPU = torch.device("cpu")
HIDDEN_SIZE = 3
MAX_UNFINISHED = 4
NUM_STEPS = 12


def rank_main(rank: int, address: tuple[str, int], results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    groups = join_groups(connect_store(address, 4), rank, 2, 2, CPU, "127.0.0.1")
    told: dict[str, Any] = {"rank": rank}
    for name in ("tp", "pp", "feedback"):
        group: RankGroup = getattr(groups, name)
        told[name] = (group.rank, group.size, group.all_reduce(torch.tensor([10.0**rank])).item())
    told["gathered"] = groups.tp.all_gather(torch.tensor([[rank], [10 + rank]])).tolist()
    told["stage"] = (groups.is_first_stage, groups.is_last_stage)
    link = StageLink(groups, HIDDEN_SIZE, torch.float32, CPU, MAX_UNFINISHED)
    told["stages"] = first_stage(link, rank) if link.is_first else last_stage(link)
    results.put(told)
    torch.distributed.barrier()  # nobody leaves while another one still reads
    leave_groups()


def first_stage(link: StageLink, rank: int) -> list[list[int]]:
    """Send a step after the other, and read the tokens as late as is allowed."""
    received = []
    for step in range(NUM_STEPS):
        if step > link.max_unread:
            received.append(link.receive_tokens(2).tolist())
        link.send_hidden(torch.full((step + 1, HIDDEN_SIZE), float(100 * rank + step)))
    received += [link.receive_tokens(2).tolist() for _ in range(NUM_STEPS - len(received))]
    return received


def last_stage(link: StageLink) -> list[float]:
    """Answer each step with two tokens that say which it was."""
    seen = []
    for step in range(NUM_STEPS):
        hidden = link.receive_hidden(step + 1)
        assert hidden is not None
        assert hidden.unique().numel() == 1
        seen.append(hidden[0, 0].item())
        link.send_tokens(torch.tensor([step, int(hidden[0, 0])]))
        link.send_tokens(torch.empty(0, dtype=torch.int64))  # a step without a token sends nothing
    return seen
