"""What an ingress replica tells of the models behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.config.admission import AdmissionConfig, TenantConfig
from app.deployments.ingress.ingress import Ingress
from app.errors import OverloadedError
from app.records.bundle import bundled
from app.records.outputs import EngineOutput
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest, Placement
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot
from tests.limits import run


@pytest.mark.parametrize(("num_live", "may_sleep", "down"), [(1, False, 0), (0, False, 1), (0, True, 0)])
@pytest.mark.parametrize("is_out", [False, True])
def test_a_model_that_may_sleep_is_not_down_without_a_replica(
    num_live: int, may_sleep: bool, down: int, is_out: bool
) -> None:
    """Scaled to zero on purpose it raised MantaNoLiveReplica, which calls somebody out of bed."""
    ingress = SimpleNamespace(
        _recorder=MetricsRecorder({"ingress": "i"}, scope="ingress"),
        _num_requests=0,
        _app=SimpleNamespace(
            state=SimpleNamespace(
                sockets={"first", "second"},
                held=SimpleNamespace(total=5),
                batch_runner=SimpleNamespace(held_bytes=7),
            )
        ),
        _pools={"m": SimpleNamespace(live=lambda: ["channel"] * num_live, num_lost=0)},
        _ports={"m": SimpleNamespace(num_connected=num_live)},
        _may_sleep={"m": may_sleep},
        _waiting_rooms={},
        _stores=SimpleNamespace(is_out=is_out),
    )
    told = decode_snapshot(Ingress._snapshot(cast(Any, ingress))).values
    assert told["manta:ingress_model_down"] == {("m",): down}
    assert told["manta:ingress_store_down"] == {(): is_out}
    assert told["manta:ingress_channels"] == {(): num_live}
    assert told["manta:ingress_direct_channels"] == {(): num_live}
    assert told["manta:ingress_sockets"] == {(): 2}
    assert told["manta:ingress_held_bytes"] == {("bodies",): 5, ("lines of batches",): 7}


async def _sizes() -> dict[str, tuple[int, int]]:
    return {"files": (2, 300), "answers": (0, 0)}


def test_the_sizes_of_the_store_are_told() -> None:
    ingress = SimpleNamespace(
        _recorder=MetricsRecorder({"ingress": "i"}, scope="ingress"), _stores=SimpleNamespace(sizes=_sizes)
    )
    run(Ingress._measure_stores(cast(Any, ingress)))
    told = decode_snapshot(ingress._recorder.snapshot()).values
    assert told["manta:ingress_stored_entries"] == {("files",): 2, ("answers",): 0}
    assert told["manta:ingress_stored_bytes"] == {("files",): 300, ("answers",): 0}


class Dispatcher:
    """Answers once, and looks at what the ingress counts meanwhile."""

    def __init__(self, ingress: SimpleNamespace) -> None:
        self._ingress = ingress
        self.counted: list[tuple[int, int]] = []

    async def outputs(self, request: EngineRequest, route: object) -> AsyncGenerator[EngineOutput, None]:
        self.counted.append((self._ingress._num_requests, self._ingress._num_of_tenant["tenant"]))
        yield EngineOutput(request.request_id, [], "stop", bundled=[])


def test_a_bundle_counts_as_its_prompts() -> None:
    """So that what an ingress and a tenant may have in flight is the same however it is packed."""
    ingress = SimpleNamespace(
        _names=SimpleNamespace(
            of_request=lambda name: SimpleNamespace(name=name, engine_name=name, max_kv_tokens=9),
        ),
        _check_room=lambda placement, count: None,
        _num_requests=0,
        _num_of_tenant=Counter[str](),
        _idle=SimpleNamespace(clear=lambda: None, set=lambda: None),
    )
    dispatcher = Dispatcher(ingress)
    ingress._dispatchers = {"m": dispatcher}
    placement = Placement(tenant="tenant")
    given = [EngineRequest(str(i), [1, 2], PoolingParams(task="embed"), placement=placement) for i in range(5)]

    async def main() -> list[EngineOutput]:
        return [output async for output in Ingress.generate(cast(Any, ingress), "m", bundled(given))]

    assert len(run(main())) == 1
    assert dispatcher.counted == [(5, 5)]
    assert (ingress._num_requests, ingress._num_of_tenant) == (0, {})


@pytest.mark.parametrize(("of_tenant", "of_all"), [(4, 100), (None, 6)])
def test_a_bundle_has_room_only_as_a_whole(of_tenant: int | None, of_all: int) -> None:
    ingress = SimpleNamespace(
        _config=SimpleNamespace(
            admission=AdmissionConfig(other_tenants=TenantConfig(max_requests=of_tenant)),
            ingress=SimpleNamespace(limits=SimpleNamespace(max_waiting_requests=of_all)),
        ),
        _recorder=MetricsRecorder({"ingress": "i"}, scope="ingress"),
        _num_requests=3,
        _num_of_tenant=Counter({"tenant": 1}),
    )

    def check(count: int) -> None:
        Ingress._check_room(cast(Any, ingress), Placement(tenant="tenant"), count)

    check(1)
    check(3)
    with pytest.raises(OverloadedError, match="at most 4 " if of_tenant else "3 requests are in flight"):
        check(4)
