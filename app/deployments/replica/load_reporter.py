"""Says of an engine replica what routing decides on: what it is, and how busy its engine is now."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from app.config.model import ModelConfig
from app.deployments.replica.stall_watch import StallWatch
from app.records.load_report import LoadReport
from app.records.stats import EngineStats


def new_incarnation() -> str:
    """A name of this process as a replica; a later one is greater."""
    return f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"


@dataclass(slots=True)
class LoadReporter:
    """One replica's."""

    model: ModelConfig
    replica_id: str
    incarnation: str
    index: int  # `engine` label of its metrics
    num_kv_tokens: int  # that the KV cache holds in requests of full length
    num_rows: int  # requests that run at once: `max_num_seqs`, or fewer
    revision: str  # what block hashes begin with before other weights come; empty where nothing is cached
    address: tuple[str, int] | None = None  # for the connections of ingresses
    stall_watch: StallWatch = field(default_factory=StallWatch)

    def report(self, stats: EngineStats, *, is_accepting: bool, answers: bool) -> LoadReport:
        """Says how busy it is; `answers`: it has given an output lately, if only to its own canary."""
        engine = self.model.engine
        return LoadReport(
            model=self.model.name,
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            accepting=is_accepting and stats.refusal is None,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            outstanding_tokens=stats.outstanding_tokens,
            num_blocks=self.num_kv_tokens // engine.block_size,
            block_size=engine.block_size,
            index=self.index,
            queued_prefill_tokens=stats.outstanding_prefill_tokens,
            resident_tokens=(stats.num_blocks - stats.num_free_blocks) * self.num_kv_tokens // stats.num_blocks,
            max_num_seqs=self.num_rows,
            prefill_token_s=stats.prefill_token_s,
            decode_step_s=stats.decode_step_s,
            answers=answers,
            model_revision=stats.model_revision if self.revision and stats.model_revision else self.revision,
            queued=stats.queued,
            begun_rate=stats.begun_rate,
            weights=stats.model_revision,
            adapters=stats.adapters,
            held=stats.held,
            address=self.address,
        )
