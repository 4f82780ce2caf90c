"""A simulated fleet whose replicas come and go as a scaler says: a cold start later, and with their requests moved."""

from __future__ import annotations

from loadtest.simulation.fleet import Fleet
from loadtest.simulation.scalers import Moment, Scaler
from loadtest.simulation.speeds import Speeds
from loadtest.simulation.traffic import SimRequest, Trace

TICK_S = 1.0


class ScaledFleet(Fleet):
    """`replica_s` counts each replica from the moment that it is asked for: its machine is held while it starts."""

    def __init__(
        self, scaler: Scaler, num_replicas: int, cold_start_s: float, num_blocks: int, speeds: Speeds, seed: int = 0
    ) -> None:
        super().__init__("prefix_aware", num_replicas, num_blocks, seed, speeds, heartbeat_s=TICK_S)
        self.replica_s = 0.0
        self.num_scalings = 0
        self.num_turns = 0  # from up to down or back
        self.most = num_replicas
        self._scaler = scaler
        self._cold_start_s = cold_start_s
        self._target = num_replicas
        self._starting: list[int] = []  # numbers of those asked for, oldest first
        self._asked = 0
        self._direction = 0
        self._waiting: dict[int, SimRequest] = {}  # requests that find no replica, by number

    def run(self, trace: Trace, length_s: float) -> None:
        """See Fleet.run."""
        self._at(0.0, self._tick)
        super().run(trace, length_s)

    def _tick(self) -> None:
        self.replica_s += TICK_S * (len(self.replicas) + len(self._starting))
        running = {name: replica.stats(self.now) for name, replica in self.replicas.items()}
        waiting = self._waiting.values()
        tokens = sum(request.prompt.num_tokens for request in waiting)
        target = self._scaler.target(Moment(self.now, self._target, running, len(waiting), tokens))
        self._scale(target)
        self._at(self.now + TICK_S, self._tick)

    def _scale(self, target: int) -> None:
        change = target - self._target
        if change:
            self.num_scalings += 1
            self.num_turns += change * self._direction < 0
            self._direction = 1 if change > 0 else -1
        self._target, self.most = target, max(self.most, target)
        for _ in range(change):
            self._asked += 1
            self._starting.append(self._asked)
            self._at(self.now + self._cold_start_s, self._started, self._asked)
        for _ in range(-change):  # Serve takes those that have not started, then the newest
            if self._starting:
                self._starting.pop()
            else:
                self._leave(max(self.replicas))

    def _started(self, number: int) -> None:
        if number in self._starting:
            self._starting.remove(number)
            self._join()

    def _place(self, request: SimRequest, num_generated: int) -> None:
        if self.replicas:
            self._waiting.pop(request.number, None)
        else:
            self._waiting[request.number] = request
        super()._place(request, num_generated)
