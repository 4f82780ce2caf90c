"""Exchanges hidden states forward, and sampled tokens back to the first stage, among the stages of a pipeline.

Sends do not wait: a stage that has sent goes on to the next step message, so that as many steps as there are stages can
be computed at once. Both ends know every size from the step message, so nothing but the tensors travels. In one
direction tensors arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from app.distributed.parallel_groups import ParallelGroups, RankGroup

TOKEN_DTYPE = torch.int32


class StageLink:
    """One rank's ends of the pipeline; with a single stage nothing is sent and nothing comes.

    `max_unfinished` sends are kept alive until they are waited for: more than step messages can be in flight, so the
    oldest one's step is over by then, and who receives it has done so if it leaves at most `max_unread` behind.
    """

    def __init__(
        self, groups: ParallelGroups, hidden_size: int, dtype: torch.dtype, device: torch.device, max_unfinished: int
    ) -> None:
        self._pp, self._feedback = groups.pp, groups.feedback
        self.hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._max_unfinished = max_unfinished
        self._unfinished: deque[tuple[list[dist.Work], torch.Tensor]] = deque()

    @property
    def max_unread(self) -> int:
        """Tensors that may be left unread before the next one is sent: with more, the sender would wait for ever."""
        return self._max_unfinished - 1

    @property
    def is_first(self) -> bool:
        """True if this stage embeds the tokens."""
        return self._pp.rank == 0

    @property
    def is_last(self) -> bool:
        """True if this stage computes logits and samples."""
        return self._pp.rank == self._pp.size - 1

    def receive_hidden(self, num_tokens: int, width: int | None = None) -> torch.Tensor | None:
        """[T, width] from the stage before, by default C wide; None in the first stage."""
        if self.is_first:
            return None
        hidden = torch.empty(num_tokens, width or self.hidden_size, dtype=self._dtype, device=self._device)
        self._receive(self._pp, hidden, self._pp.rank - 1)
        return hidden

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """[T, width] to the next stage; nothing in the last one."""
        if not self.is_last:
            self._send(self._pp, hidden, self._pp.rank + 1)

    def send_tokens(self, token_ids: torch.Tensor, *, to_all: bool = False) -> None:
        """Sampled tokens [N] of a step, or [N, W] numbers of each row, from the last stage to the first, or to all
        before it; nothing with one stage or no token."""
        assert self.is_last
        if self._pp.size > 1 and len(token_ids):
            stages = range(self._pp.rank) if to_all else range(1)
            self._send(self._feedback, token_ids.to(TOKEN_DTYPE), *stages)

    def receive_tokens(self, *shape: int) -> torch.Tensor:
        """int32 [N] or [N, W]: the oldest that were sent and not received yet."""
        tokens = torch.empty(shape, dtype=TOKEN_DTYPE, device=self._device)
        self._receive(self._feedback, tokens, self._feedback.size - 1)
        return tokens

    def _send(self, group: RankGroup, tensor: torch.Tensor, *to: int) -> None:
        while len(self._unfinished) >= self._max_unfinished:
            for work in self._unfinished.popleft()[0]:
                work.wait()
        tensor = tensor.contiguous()
        works = [dist.isend(tensor, group=group.handle, group_dst=stage) for stage in to]
        self._unfinished.append(([work for work in works if work is not None], tensor))

    def _receive(self, group: RankGroup, tensor: torch.Tensor, source: int) -> None:
        work = dist.irecv(tensor, group=group.handle, group_src=source)
        assert work is not None
        work.wait()  # on a GPU the stream waits, not this thread
