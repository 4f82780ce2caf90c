"""The columns of a load book's table are those of its loads, whatever happens to them."""

from __future__ import annotations

import random

import numpy as np

from app.deployments.routing.load_book import REPORT_EXPIRES_S, LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import ReplicaLoad, RouteQuery
from app.deployments.routing.policies.load_table import LoadTable
from app.deployments.routing.prefix_index import PrefixIndex
from app.records.kv_events import KVEvent, KVEventBatch
from app.records.load_report import LoadReport


def report(name: str, rng: random.Random) -> LoadReport:
    numbers = [rng.randrange(50) for _ in range(4)]
    return LoadReport(
        *("m", name, str(rng.randrange(2)), rng.random() < 0.95, *numbers[:2], rng.randrange(9000), 1000, 16, 0),
        queued_prefill_tokens=rng.randrange(5000),
        resident_tokens=rng.randrange(20_000),
        max_num_seqs=64,
        prefill_token_s=rng.random(),
        decode_step_s=rng.random(),
    )


def test_columns_follow_every_change() -> None:
    rng, now = random.Random(1), [0.0]
    index = PrefixIndex()
    book = LoadBook(create_policy("prefix_aware"), lambda: now[0], index)
    names = [f"r{i}" for i in range(6)]
    sizes = set()
    for step in range(1500):
        now[0] += rng.expovariate(20.0) if rng.random() < 0.99 else REPORT_EXPIRES_S
        name, act = rng.choice(names), rng.random()
        if act < 0.1:
            stored = KVEvent("stored", "device", step.to_bytes(16, "little"))
            index.apply(KVEventBatch(name, "1", 0, [stored], is_snapshot=True))
        if act < 0.5:
            book.report(report(name, rng))
        elif act < 0.52:
            book.remove(name)
        else:
            book.route(RouteQuery(rng.randrange(1, 900), 50, (step.to_bytes(16, "little"),)))
        loads = book.replicas()
        table, fresh = book._candidates(), LoadTable(loads)
        sizes.add(len(loads))
        assert [load.report.replica_id for load in loads] == sorted(table.position)
        np.testing.assert_array_equal(table._columns, fresh._columns)
    assert sizes >= {0, 1, 2, 5, 6}


def test_each_column_is_its_figure() -> None:
    load = ReplicaLoad(report("a", random.Random(3)), 700, 300, 2, 4000)
    table = LoadTable([load])
    told = load.report
    assert table[0] is load
    assert table.num_requests[0] == told.num_running + told.num_waiting + 2
    assert table.outstanding_tokens[0] == told.outstanding_tokens + 700
    assert table.queued_prefill_tokens[0] == told.queued_prefill_tokens + 300
    assert table.fullness[0] == load.fullness == max((told.resident_tokens + 300) / 16_000, load.num_requests / 64)
    assert table.cache_share[0] == 1.0  # never more
    assert (table.prefill_token_s[0], table.decode_step_s[0]) == (told.prefill_token_s, told.decode_step_s)
    assert table.block_size[0] == 16
