"""Gates that send tokens to experts drawn evenly, whatever they compute.

Random weights route unevenly, and in every engine otherwise: so engines are compared with this on both sides (in vLLM
VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random). A gate computes as always; then a part of a table stands in the
place of what it has chosen, in each layer another part, without a launch of its own. Padding goes to experts too:
batches should have the size of a graph. A step of one token whose layers are one launch (`app/kernels/whole_step`)
chooses by itself: of one token experts are as many either way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from app.config.engine import EngineConfig
from app.engine.executor.worker_group_executor import WorkerGroupExecutor
from app.kernels.moe import MOE_OPS, MoEOps, Routing, RoutingRule
from app.records.worker_info import RendezvousInfo
from app.worker.worker import Worker

MOST_TOKENS = 1 << 14  # of one step
_STRIDE = 336  # from a layer's place in the table to the next one's; kernels like addresses that 16 divides


class EvenGate:
    """Stands in the place of `MoEOps.gate`."""

    def __init__(self, ops: MoEOps) -> None:
        self._gate = ops.gate
        self._tables: dict[tuple[int, int, int], torch.Tensor] = {}  # by numbers of experts, and of those of a token
        self._places: dict[int, int] = {}  # by the address of a gate's weight

    def __call__(
        self, x: Any, weight: torch.Tensor, bias: torch.Tensor | None, rule: RoutingRule, **more: Any
    ) -> Routing:
        """The gate's weights, for other experts."""
        routing = self._gate(x, weight, bias, rule, **more)
        place = self._places.setdefault(weight.data_ptr(), len(self._places) * _STRIDE % MOST_TOKENS)
        table = self._table(len(weight) - rule.gates_shared, rule.top_k, rule.num_shared, weight.device)
        return routing._replace(ids=table[place : place + len(routing.ids)])

    def _table(self, num_experts: int, top_k: int, num_shared: int, device: torch.device) -> torch.Tensor:
        """int32 [2 * MOST_TOKENS, top_k + num_shared], no expert twice in a row."""
        key = num_experts, top_k, num_shared
        if key not in self._tables:
            generator = torch.Generator().manual_seed(0)
            scores = torch.rand(2 * MOST_TOKENS, num_experts, generator=generator, device="cpu")
            shared = torch.arange(num_experts, num_experts + num_shared).expand(len(scores), -1)
            self._tables[key] = torch.cat((scores.topk(top_k, dim=1).indices, shared), dim=1).int().to(device)
        return self._tables[key]


def route_evenly() -> None:
    """From now on, in this process and in workers that it starts: to be called before an engine is made."""
    MOE_OPS.on = _evenly_on  # type: ignore[method-assign]
    init = WorkerGroupExecutor.__init__

    def with_even_workers(executor: WorkerGroupExecutor, config: EngineConfig, worker_class: str = "") -> None:
        init(executor, config, f"{__name__}:{even_worker.__name__}")

    WorkerGroupExecutor.__init__ = with_even_workers  # type: ignore[method-assign]


def even_worker(
    config: EngineConfig, rank: int, world_size: int, local_rank: int, rendezvous: RendezvousInfo | None
) -> Worker:
    """A rank of a worker group whose gates are even."""
    route_evenly()
    return Worker(config, rank, world_size, local_rank, rendezvous)


_on = MOE_OPS.on


@cache
def _evenly_on(device: torch.device, *, exact: bool = False) -> MoEOps:
    """The functions for a device, with this gate."""
    ops = _on(device, exact=exact)
    return replace(ops, gate=EvenGate(ops))
