"""The index against plain sets: longest prefixes, lost, doubled, reordered and stale events, its bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence

from app.deployments.routing.prefix_index import NUM_SHARDS, PrefixIndex, PrefixMatch
from app.records.kv_events import EMPTY_PREFIX, KVEvent, KVEventBatch, KVEventLog, KVTier

LONG_S = 1e9  # later than any speculative entry


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


def chain(*ids: int) -> list[bytes]:
    return [name(i) for i in ids]


def stored(replica: str, sequence: int, hashes: Sequence[bytes], tier: KVTier = "device") -> KVEventBatch:
    return KVEventBatch(replica, "1", sequence, [KVEvent("stored", tier, b"".join(hashes))])


def matches(index: PrefixIndex, *ids: int, now: float = 0.0) -> dict[str, tuple[int, int]]:
    return {replica: tuple(match) for replica, match in index.match(chain(*ids), now).items()}


def test_longest_prefix_of_every_replica() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, chain(1, 2, 3, 4)))
    index.apply(stored("b", 0, chain(1, 2)))
    index.apply(stored("c", 0, chain(2, 3)))  # without the first block, the others are of no use
    index.apply(stored("d", 0, chain(1, 3, 4)))  # a hole: only what is before it counts
    assert matches(index, 1, 2, 3, 4, 5) == {"a": (4, 0), "b": (2, 0), "d": (1, 0)}
    assert matches(index, 1) == {"a": (1, 0), "b": (1, 0), "d": (1, 0)}
    assert matches(index, 9) == {}
    assert index.match([], 0.0) == {}


def test_host_blocks_count_after_those_on_the_device() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, chain(1, 2)))
    index.apply(stored("a", 1, chain(2, 3, 4), "host"))
    index.apply(stored("b", 0, chain(1, 2, 3, 4), "host"))
    assert matches(index, 1, 2, 3, 4, 5) == {"a": (2, 2), "b": (0, 4)}
    index.apply(KVEventBatch("a", "1", 2, [KVEvent("removed", "device", b"".join(chain(1, 2)))]))
    assert matches(index, 1, 2, 3, 4) == {"b": (0, 4)}
    assert matches(index, 2, 3, 4)["a"] == (0, 3)  # the other tier has stayed
    index.apply(KVEventBatch("a", "1", 3, [KVEvent("removed", "host", b"".join(chain(2, 3, 4)))]))
    assert index.num_blocks("a") == 0
    assert matches(index, 2, 3, 4) == {"b": (0, 3)}


def test_where_layers_keep_states_a_prefix_ends_at_one() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, [EMPTY_PREFIX], "state"))
    index.apply(stored("a", 1, chain(1, 2, 3, 4)))
    index.apply(stored("b", 0, chain(1, 2)))
    assert matches(index, 1, 2, 3, 4) == {"b": (2, 0)}, "blocks alone are no hit"
    index.apply(stored("a", 2, chain(1, 3), "state"))
    assert matches(index, 1, 2, 3, 4) == {"a": (3, 0), "b": (2, 0)}
    assert matches(index, 1, 2) == {"a": (1, 0), "b": (2, 0)}
    assert index.num_blocks("a") == 4, "states are no blocks"
    index.apply(KVEventBatch("a", "1", 3, [KVEvent("removed", "device", name(2)), KVEvent("stored", "host", name(2))]))
    assert matches(index, 1, 2, 3, 4)["a"] == (1, 2)
    index.apply(KVEventBatch("a", "1", 4, [KVEvent("removed", "state", name(3))]))
    assert matches(index, 1, 2, 3, 4)["a"] == (1, 0)
    snapshot = [KVEvent("stored", "device", b"".join(chain(1, 2))), KVEvent("stored", "state", EMPTY_PREFIX)]
    index.apply(KVEventBatch("a", "1", 5, snapshot, is_snapshot=True))
    assert "a" not in matches(index, 1, 2)


def test_states_that_a_request_will_leave_are_expected() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, [EMPTY_PREFIX], "state"))
    index.expect_blocks("a", chain(1, 2, 3), 0.0, num_to_state=2)
    assert matches(index, 1, 2, 3, 4) == {"a": (2, 0)}
    assert matches(index, 1, 2, 3, now=9.0) == {}
    index.apply(stored("b", 0, chain(1)))
    index.expect_blocks("b", chain(1, 2, 3), 9.0, num_to_state=2)
    assert matches(index, 1, 2, 3, now=9.0) == {"b": (3, 0)}


def test_order_does_not_matter_and_doubles_do_nothing() -> None:
    index = PrefixIndex()
    batches = [stored("a", i, chain(i)) for i in range(5)]
    assert index.apply(batches[0]) == "applied"
    assert index.apply(batches[2]) == "gap"
    assert not index.is_synced("a")
    assert index.apply(batches[4]) == "gap"
    assert index.apply(batches[1]) == "applied"  # and so is 2; 3 is missing
    assert not index.is_synced("a")
    assert index.apply(batches[3]) == "applied"
    assert index.is_synced("a")
    assert index.num_blocks("a") == 5
    assert index.apply(batches[3]) == "stale"
    assert index.num_blocks("a") == 5


def test_snapshot_replaces_everything() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, chain(1)))
    index.apply(stored("a", 3, chain(7)))
    snapshot = KVEventBatch("a", "1", 2, [KVEvent("stored", "device", b"".join(chain(5, 6)))], is_snapshot=True)
    assert index.apply(snapshot) == "applied"
    assert index.is_synced("a")  # 3 had come before
    assert matches(index, 1) == {}
    assert matches(index, 5, 6, 7) == {"a": (3, 0)}
    assert index.apply(snapshot) == "stale"


def test_later_incarnation_wins() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, chain(1, 2)))
    new = KVEventBatch("a", "2", 0, [KVEvent("stored", "device", name(3))])
    assert index.apply(new) == "applied"
    assert matches(index, 1) == {}
    assert index.apply(stored("a", 1, chain(9))) == "stale"
    assert matches(index, 9) == {}


def test_dropped_replica_comes_back_by_a_snapshot_only() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, chain(1)))
    index.drop("a")
    assert matches(index, 1) == {}
    assert index.apply(stored("a", 1, chain(2))) == "stale"
    index.expect_blocks("a", chain(3), 0.0)
    assert index.replicas() == []
    index.apply(KVEventBatch("a", "1", 1, [KVEvent("stored", "device", name(1))], is_snapshot=True))
    assert matches(index, 1) == {"a": (1, 0)}
    index.drop("nobody")


def test_slots_are_used_again_after_the_sweep() -> None:
    index = PrefixIndex()
    for life in range(40):
        index.apply(stored(f"r{life}", 0, chain(*range(50))))
        index.drop(f"r{life}")
        for i in range(NUM_SHARDS + 1):
            index.apply(KVEventBatch("other", "1", life * (NUM_SHARDS + 1) + i, []))
        assert matches(index, 0, now=10.0 * life) == {}
    assert len(index._names) <= 6
    assert len(index) == 0
    assert matches(index, 0) == {}


def test_siblings_find_what_is_only_on_its_way() -> None:
    index = PrefixIndex(speculative_life_s=4.0)
    index.apply(stored("a", 0, chain(1)))
    index.expect_blocks("a", chain(1, 2, 3), 100.0)
    index.expect_blocks("b", chain(1, 2), 100.0)  # nothing was heard of it yet
    assert matches(index, 1, 2, 3, now=101.0) == {"a": (3, 0), "b": (2, 0)}
    assert not index.is_synced("b")
    assert matches(index, 1, 2, 3, now=104.1) == {"a": (1, 0)}
    assert index.num_speculative == 0


def test_what_siblings_keep_asking_for_stays_expected_but_not_once_it_was_told() -> None:
    index = PrefixIndex(speculative_life_s=4.0)
    for second in range(9):  # longer than one life, and no event comes
        known = index.match(chain(1, 2, 3), float(second)).get("a", PrefixMatch(0)).device_blocks
        assert known == (3 if second else 0)
        index.expect_blocks("a", chain(1, 2, 3), float(second), known)
    index.apply(stored("a", 0, chain(1, 2, 3)))
    for second in range(9, 18):
        index.expect_blocks("a", chain(1, 2, 3), float(second), 3)
    index.apply(KVEventBatch("a", "1", 1, [KVEvent("removed", "device", b"".join(chain(2, 3)))]))
    assert matches(index, 1, 2, 3, now=18.0) == {"a": (1, 0)}


def test_an_ended_generation_goes_bit_by_bit() -> None:
    index = PrefixIndex(speculative_life_s=2.0)
    index.apply(stored("a", 0, []))
    for i in range(1000):
        index.expect_blocks("a", chain(3 * i, 3 * i + 1, 3 * i + 2), 100.0)
    index.match([], 102.5)
    assert len(index._waste) == 3000
    for i in range(500):
        index.expect_blocks("a", chain(10_000 + i), 102.6)
    index.apply(stored("a", 1, []))
    assert len(index._waste) < 2000
    assert index.num_speculative == 500


def test_speculation_ends_with_the_replica() -> None:
    index = PrefixIndex()
    index.apply(stored("a", 0, []))
    index.expect_blocks("a", chain(1, 2), 0.0)
    index.drop("a")
    assert matches(index, 1, 2, now=0.1) == {}


def test_cap_holds_and_what_is_used_stays_longest() -> None:
    cap = 64 * NUM_SHARDS
    index = PrefixIndex(max_blocks=cap)
    used = chain(*range(1000))
    index.apply(stored("a", 0, used))
    for sequence in range(1, 41):
        hashes = [name(1_000_000 * sequence + i) for i in range(2000)]
        index.apply(stored("a", sequence, hashes))
        index.expect_blocks("a", used, float(sequence))
        assert len(index) <= cap
    assert index.num_evicted > 0
    assert index.num_blocks("a") == len(index)
    assert index.match(used, LONG_S)["a"].device_blocks > 900
    assert index.match([name(1_000_000)], LONG_S) == {}


class Replica:
    """An engine's truth: plain sets, and the log that tells of them."""

    def __init__(self, replica_id: str, incarnation: int) -> None:
        self.replica_id, self.incarnation = replica_id, incarnation
        self.cached: dict[KVTier, set[bytes]] = {"device": set(), "host": set()}
        self.log = KVEventLog(replica_id, f"{incarnation:06d}")

    def change(self, rng: random.Random, chains: list[list[bytes]]) -> None:
        tier: KVTier = "device" if rng.random() < 0.7 else "host"
        some = rng.choice(chains)
        hashes = some[: rng.randrange(1, len(some) + 1)]
        if rng.random() < 0.6:
            self.cached[tier].update(hashes)
            self.log.report_stored(b"", hashes, tier)
        else:
            gone = rng.sample(hashes, rng.randrange(1, len(hashes) + 1))  # any of them: holes are allowed
            self.cached[tier].difference_update(gone)
            self.log.report_removed(gone, tier)

    def prefix(self, hashes: list[bytes]) -> PrefixMatch:
        device = host = 0
        while device < len(hashes) and hashes[device] in self.cached["device"]:
            device += 1
        while device + host < len(hashes) and hashes[device + host] in self.cached["device"] | self.cached["host"]:
            host += 1
        return PrefixMatch(device, host)


def test_index_equals_the_truth_after_10000_operations() -> None:
    """Batches are lost, doubled, late, out of order, or of a dead incarnation; a gap is answered with a snapshot."""
    rng = random.Random(7)
    chains = [[name(100 * c + i) for i in range(rng.randrange(1, 12))] for c in range(30)]
    chains += [chains[c][:3] + [name(10_000 + 100 * c + i) for i in range(5)] for c in range(10)]  # shared beginnings
    index = PrefixIndex()
    replicas = {f"r{i}": Replica(f"r{i}", 0) for i in range(6)}
    late: list[KVEventBatch] = []
    outcomes = {"applied": 0, "stale": 0, "gap": 0}

    def deliver(batch: KVEventBatch) -> None:
        outcome = index.apply(batch)
        outcomes[outcome] += 1
        if outcome == "gap" and rng.random() < 0.3:
            owner = replicas.get(batch.replica_id)
            if owner is not None:
                index.apply(owner.log.snapshot())

    for step in range(10_000):
        replica_id = rng.choice(list(replicas))
        replica = replicas[replica_id]
        replica.change(rng, chains)
        if rng.random() < 0.5 and (batch := replica.log.flush()) is not None:
            fate = rng.random()
            if fate < 0.75:
                deliver(batch)
            if 0.65 < fate < 0.9:
                late.append(batch)  # doubled or late; above that, lost
        if late and rng.random() < 0.3:
            deliver(late.pop(rng.randrange(len(late))))
        if rng.random() < 0.01:
            index.expect_blocks(replica_id, rng.choice(chains), step * 0.01)
        if rng.random() < 0.002:  # it dies and comes back under its name, or under a new one
            index.drop(replica_id)
            del replicas[replica_id]
            fresh = replica_id if rng.random() < 0.5 else f"r{step}"
            replicas[fresh] = Replica(fresh, step + 1)

    for batch in late:
        deliver(batch)
    for replica in replicas.values():
        replica.log.flush()
        index.apply(replica.log.snapshot())
    assert min(outcomes.values()) > 100, outcomes
    assert set(index.replicas()) == set(replicas)
    for hashes in chains:
        found = index.match(hashes, LONG_S)
        truth = {name: replica.prefix(hashes) for name, replica in replicas.items()}
        assert found == {name: match for name, match in truth.items() if sum(match)}
    for replica_id, replica in replicas.items():
        assert index.is_synced(replica_id)
        assert index.num_blocks(replica_id) == sum(map(len, replica.cached.values()))


def test_without_loss_no_snapshot_is_needed() -> None:
    """Shuffled within a window and doubled, but all there: the index follows by itself."""
    rng = random.Random(3)
    chains = [[name(100 * c + i) for i in range(8)] for c in range(20)]
    replica, index = Replica("a", 0), PrefixIndex()
    sent: list[tuple[float, KVEventBatch]] = []  # with when each arrives
    for _ in range(2000):
        replica.change(rng, chains)
        if (batch := replica.log.flush()) is not None:
            sent += [(batch.sequence + rng.uniform(0, 30), batch) for _ in range(rng.choice((1, 1, 1, 2)))]
    for _, batch in sorted(sent, key=lambda arrival: arrival[0]):
        index.apply(batch)
    assert index.is_synced("a")
    for hashes in chains:
        assert index.match(hashes, LONG_S).get("a", PrefixMatch(0)) == replica.prefix(hashes)
