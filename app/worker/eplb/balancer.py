"""Follows what tokens ask of experts, and moves experts between ranks so that these are equally busy.

All ranks see all tokens, so they count alike, reach the same placements and move the same experts before the same
steps, without a word to each other but the experts themselves. Counting costs a step one small kernel a layer; once an
interval the counts of its last window are copied to the host beside the steps, then layer after layer is looked at:
one that is out of balance is moved, no more than one at a time, a few experts before each step, and swapped when all
are there.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque

import numpy as np
import torch

from app.config.engine import EngineConfig
from app.distributed.parallel_groups import RankGroup
from app.errors import ConfigError
from app.layers.experts.expert_mlp import Experts
from app.layers.experts.placement import Loads, imbalance, place
from app.platforms import platform_of
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.worker.eplb.exchange import Exchange
from app.worker.features.context import FeatureContext
from app.worker.rows.worker_feature import WorkerFeature

logger = logging.getLogger("manta.experts")

SETTLED = 2  # steps between the copy of counts, or a move's last experts, and its use
EVEN = 1.05  # busiest over mean: a layer that is this even stays
GAIN = 0.05  # what a move must take away from it


class ExpertBalancer(WorkerFeature):
    """One rank's."""

    def __init__(self, layers: list[Experts], group: RankGroup, config: EngineConfig, device: torch.device) -> None:
        """Collective. ConfigError where ranks keep experts of a layer in unlike forms: none can take another's."""
        check_alike(layers, group, device)
        self.layers, self._group = layers, group
        self._window, self._interval = config.eplb_window_size, config.eplb_step_interval
        self._exchange = Exchange(layers, group, device)
        self._runtime = platform_of(device).runtime
        pinned = self._runtime is not None
        size = (len(layers), len(self._counts(0)))
        self._host = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._copied = None if self._runtime is None else self._runtime.Event()
        self._left: deque[int] = deque()  # layers to look at
        self._is_gathering = False
        self._steps = self._idle_until = 0
        self._moved = 0  # experts, since the last report
        self._imbalances = np.ones(len(layers))  # of layers, as counted last
        assert layers[0].map is not None
        place(self._host[0].numpy().astype(np.float64), layers[0].map.slots)  # the first call is the slowest

    def before(self, step: SchedulerOutput) -> None:
        """Every rank gets every step message, so all are at the same one here."""
        if step.step_id < 0:  # of the warm-up
            return
        self._steps += 1
        phase = self._steps % self._interval
        if phase == 0 and not self._left and not self._exchange.is_moving:
            self._read_counts()
        if phase == -self._window % self._interval or self._steps == 1:  # the warm-up was counted, too
            for number in range(len(self.layers)):
                self._counts(number).zero_()
        if self._steps < self._idle_until:
            return
        if self._left or self._exchange.is_moving:
            self._go_on()

    def report(self, output: ModelRunnerOutput) -> None:
        """Reports what has been moved, and how even the ranks were: in this pipeline stage's layers."""
        output.figures["experts_moved"], self._moved = self._moved, 0
        output.figures["expert_imbalance"] = float(self._imbalances.mean())

    def weights_leave(self) -> None:
        """Bring the move that is under way to its end."""
        self._left.clear()
        self._is_gathering = False
        if self._exchange.is_moving:
            self._exchange.finish()

    def weights_change(self, whole: bool) -> None:
        """Experts where the checkpoint has them, now; only their places, if all of them will come from there."""
        self.weights_leave()
        for layer in self.layers:
            assert layer.map is not None
            first = layer.map.share.slots
            if whole:
                layer.map.hold(first)
            elif (layer.map.slots != first).any():
                self._exchange.begin(layer, first)
                self._exchange.finish()

    def _counts(self, number: int) -> torch.Tensor:
        found = self.layers[number].map
        assert found is not None
        return found.counts

    def _read_counts(self) -> None:
        counts = torch.stack([self._counts(number) for number in range(len(self.layers))])
        self._host.copy_(counts, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._left.extend(range(len(self.layers)))
        self._idle_until = self._steps + SETTLED

    def _go_on(self) -> None:
        """One thing before one step: some experts, or the swap, or a look at the next layer."""
        if self._is_gathering:
            self._is_gathering = self._exchange.advance()
            if not self._is_gathering:
                self._idle_until = self._steps + SETTLED
        elif self._exchange.is_moving:
            self._exchange.finish()
        else:
            self._look()

    def _look(self) -> None:
        """At the next layer: does it have to move?"""
        if self._copied is not None:
            self._copied.synchronize()  # long over
        number = self._left.popleft()
        loads: Loads = self._host[number].numpy().astype(np.float64)
        self._is_gathering = self._moves(number, loads)

    def _moves(self, number: int, loads: Loads) -> bool:
        layer = self.layers[number]
        assert layer.map is not None
        self._imbalances[number] = before = imbalance(loads, layer.map.slots)
        if before <= EVEN:
            return False
        wanted = place(loads, layer.map.slots)
        after = imbalance(loads, wanted)
        if before - after < GAIN:
            return False
        count = int((wanted != layer.map.slots).sum())
        self._exchange.begin(layer, wanted)
        self._moved += count
        if self._group.rank == 0:
            logger.info(
                "experts of layer %d: the busiest rank had %.2f of the mean, has %.2f now; %d moved",
                number, before, after, count,
            )  # fmt: skip
        return True


def check_alike(layers: list[Experts], group: RankGroup, device: torch.device) -> None:
    """Collective: every rank raises, or none."""
    forms = [str([(tensor.dtype, tensor.shape[1:]) for tensor in layer.slot_tensors]) for layer in layers]
    own = [int.from_bytes(hashlib.sha256(form.encode()).digest()[:7]) for form in forms]
    every = group.all_gather(torch.tensor([own], dtype=torch.int64, device=device), dim=0).tolist()
    odd = next((n for n, ranks in enumerate(zip(*every, strict=True)) if len(set(ranks)) > 1), None)
    if odd is not None:
        raise ConfigError(
            f"enable_eplb: experts of expert layer {odd} of this stage are not stored alike on all ranks (here "
            f"{forms[odd]}), so none can move: leave enable_eplb out, or quantize all experts of a layer alike",
            param="enable_eplb",
        )


def create(context: FeatureContext) -> ExpertBalancer | None:
    """Makes the balancer where experts may move."""
    if not context.config.enable_eplb:
        return None
    layers = [module for module in context.forward.model.modules() if isinstance(module, Experts)]
    return ExpertBalancer(layers, layers[0].group, context.config, context.state.device) if layers else None
