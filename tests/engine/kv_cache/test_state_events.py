"""What the outside hears of a pool that holds states beside blocks of tokens."""

from __future__ import annotations

from app.engine.kv_cache.state_events import StateEvents
from app.records.kv_events import EMPTY_PREFIX, KVEventLog

KEYS = [bytes([number]) * 16 for number in (1, 2, 3)]
PART = KEYS[2] + b"ab"


def test_blocks_of_states_are_not_shown_but_states_are() -> None:
    log = KVEventLog("r", "1")
    events = StateEvents(log)
    events.report_stored(b"", [KEYS[0], PART])
    events.report_stored(b"", [PART], "host")
    events.announce(KEYS[0])
    batch = log.flush()
    assert batch is not None
    assert [(event.kind, event.tier, event.split()) for event in batch.events] == [
        ("stored", "device", [KEYS[0]]),
        ("stored", "state", [EMPTY_PREFIX, KEYS[0]]),
    ]
    events.report_removed([PART])
    events.report_removed([PART], "host")
    assert log.flush() is None
    events.report_removed([KEYS[1]])
    assert events.doubtful == {KEYS[1], KEYS[2]}
    events.withdraw([KEYS[0]])
    batch = log.flush()
    assert batch is not None
    assert [(event.kind, event.tier) for event in batch.events] == [("removed", "state")]


def test_nobody_needs_to_listen() -> None:
    events = StateEvents(None)
    events.announce(KEYS[0])
    events.report_removed(KEYS)
    assert events.doubtful == set(KEYS)
