"""How fast and how big the router's index is: `python -m benchmarks.router [--blocks N] [--replicas R] [--depth D]`.

Decisions as the Router makes them (admission, match, cost of every replica, bookkeeping), events as replicas send them,
memory from the process's resident size. One process, one core; no Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence

import numpy as np

from app.config.admission import AdmissionConfig
from app.deployments.router.admission import Admission
from app.deployments.router.retry_budget import RetryBudget
from app.deployments.routing.claim import Claim
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import RouteQuery
from app.deployments.routing.prefix_index import PrefixIndex
from app.records.block_hash import HASH_BYTES
from app.records.kv_events import KVEvent, KVEventBatch
from app.records.load_report import LoadReport

BLOCK_SIZE = 16
CHAIN_BLOCKS = 250  # blocks of a chain that one replica holds: 4,000 tokens
SHARED_CHAINS = 20  # every fourth replica holds the first ones, as it would a system prompt
BATCH_BLOCKS = 32  # hashes of one event batch while serving


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run all measurements, print them as one JSON line, and return them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks indexed")
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--depth", type=int, default=CHAIN_BLOCKS, help="blocks of a request's prompt")
    parser.add_argument("--decisions", type=int, default=3000)
    options = parser.parse_args(argv)
    before = _resident_bytes()
    index = PrefixIndex(max_blocks=4 * options.blocks)
    chains, num_events, seconds = _fill(index, options.blocks, options.replicas)
    result: dict[str, float] = {
        "blocks": len(index),
        "replicas": options.replicas,
        "bytes_per_block": (_resident_bytes() - before) / len(index),
        "snapshot_blocks_per_s": num_events / seconds,
    }
    result |= _decisions(index, chains, options.replicas, options.depth, options.decisions)
    result |= _events(index, options.replicas)
    result |= _drop(index)
    result |= _cap(options.blocks // 10)
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))
    return result


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _hashes(count: int) -> bytes:
    return os.urandom(HASH_BYTES * count)


def _split(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES))


def _name(replica: int) -> str:
    return f"replica-{replica:04d}"


def _snapshot(replica: int, data: bytes) -> KVEventBatch:
    return KVEventBatch(_name(replica), "1", 0, [KVEvent("stored", "device", data)], is_snapshot=True)


def _fill(index: PrefixIndex, num_blocks: int, num_replicas: int) -> tuple[list[bytes], int, float]:
    """Chains (some for the queries), blocks told, seconds. Every fourth replica also has the shared chains."""
    shared = [_hashes(CHAIN_BLOCKS) for _ in range(SHARED_CHAINS)]
    own = max(1, (num_blocks - SHARED_CHAINS * CHAIN_BLOCKS) // num_replicas // CHAIN_BLOCKS)
    chains, told, seconds = list(shared), 0, 0.0
    for replica in range(num_replicas):
        mine = [_hashes(CHAIN_BLOCKS) for _ in range(own)]
        data = b"".join(mine + (shared if replica % 4 == 0 else []))
        began = time.perf_counter()
        index.apply(_snapshot(replica, data))
        seconds += time.perf_counter() - began
        told += len(data) // HASH_BYTES
        chains += mine[:8]
    return chains, told, seconds


def _decisions(index: PrefixIndex, chains: list[bytes], replicas: int, depth: int, count: int) -> dict[str, float]:
    book = LoadBook(create_policy("prefix_aware"), index=index)
    config = AdmissionConfig()
    admission = Admission(config, book, RetryBudget(config.retry_share, config.min_retries_per_s))
    claim = Claim(time_left_s=600.0, until_first_token=True)  # as the SDK of OpenAI asks for a stream
    rng = random.Random(1)
    reports = [_report(i, rng) for i in range(replicas)]
    times, cpu_times = [], []
    for i in range(count):
        if i % 50 == 0:
            for report in reports:
                book.report(report)
        query = _query(rng.choice(chains), depth, rng)
        began, cpu_began = time.perf_counter(), time.thread_time()
        admission.answer(query, claim)
        cpu_times.append(time.thread_time() - cpu_began)
        times.append(time.perf_counter() - began)
    p50, p99 = np.percentile(times, [50, 99]) * 1e6
    cpu_p50, cpu_p99 = np.percentile(cpu_times, [50, 99]) * 1e6  # without what other processes took
    return {
        **{"decision_p50_us": p50, "decision_p99_us": p99},
        **{"decision_cpu_p50_us": cpu_p50, "decision_cpu_p99_us": cpu_p99, "depth": depth},
    }


def _query(chain: bytes, depth: int, rng: random.Random) -> RouteQuery:
    """A prompt that shares a random part of a known chain and then goes its own way."""
    known = _split(chain)[: rng.randrange(depth + 1)]
    hashes = known + _split(_hashes(depth - len(known)))
    return RouteQuery(depth * BLOCK_SIZE + 7, 128, hashes)


def _report(replica: int, rng: random.Random) -> LoadReport:
    return LoadReport(
        *(
            "m",
            _name(replica),
            "1",
            True,
            rng.randrange(60),
            0,
            rng.randrange(20_000),
            40_000,
            BLOCK_SIZE,
            replica,
        ),
        queued_prefill_tokens=rng.randrange(8000),
        resident_tokens=rng.randrange(600_000),
        max_num_seqs=256,
        prefill_token_s=7e-5,
        decode_step_s=0.012,
    )


def _batches(replicas: int, count: int) -> Iterator[KVEventBatch]:
    sequences = [0] * replicas
    stored: list[list[bytes]] = [[] for _ in range(replicas)]
    for i in range(count):
        replica = i % replicas
        sequences[replica] += 1
        data = _hashes(BATCH_BLOCKS)
        events = [KVEvent("stored", "device", data)]
        if stored[replica]:
            events.insert(0, KVEvent("removed", "device", stored[replica].pop()))
        stored[replica].append(data)
        yield KVEventBatch(_name(replica), "1", sequences[replica], events)


def _events(index: PrefixIndex, replicas: int) -> dict[str, float]:
    batches = list(_batches(replicas, 40 * replicas))
    began = time.perf_counter()
    for batch in batches:
        assert index.apply(batch) == "applied"
    seconds = time.perf_counter() - began
    blocks = sum(len(event.hashes) // HASH_BYTES for batch in batches for event in batch.events)
    return {"event_batches_per_s": len(batches) / seconds, "event_blocks_per_s": blocks / seconds}


def _drop(index: PrefixIndex) -> dict[str, float]:
    """The drop itself, and the longest of the steps that take the dropped replica's bits out."""
    began = time.thread_time()
    index.drop(_name(0))
    dropped_s = time.thread_time() - began
    longest_s = 0.0
    for sequence in range(300):
        began = time.thread_time()
        index.apply(KVEventBatch("sweeper", "1", sequence, []))
        longest_s = max(longest_s, time.thread_time() - began)
    return {"drop_us": dropped_s * 1e6, "longest_sweep_us": longest_s * 1e6}


def _cap(max_blocks: int) -> dict[str, float]:
    """An index at its cap, given ten times as much: entries and memory stay."""
    index = PrefixIndex(max_blocks)
    sizes = []
    for sequence in range(10):
        index.apply(KVEventBatch("a", "1", sequence, [KVEvent("stored", "device", _hashes(max_blocks))]))
        sizes.append(_resident_bytes())
    assert len(index) <= max_blocks
    return {"cap_blocks": max_blocks, "capped_len": len(index), "capped_growth_bytes": sizes[-1] - sizes[1]}


if __name__ == "__main__":
    main()
