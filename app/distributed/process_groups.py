"""Makes the process groups of a worker group: the ranks meet at a store, then every rank makes every group, in the same
order.

GPU ranks get NCCL for tensors on the device and gloo for those on the host, in one handle; CPU ranks get gloo. The
store is a server in rank 0 (RankStore), whose address the executor hands to the others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.platforms import platform_of

# Generous: whoever waits this long has been found dead by its driver before (start_timeout_s, step_timeout_s).
TIMEOUT = timedelta(days=1)


class RankStore:
    """Rank 0's end of the rendezvous: a key-value server on `host`, on a port that the system chose."""

    def __init__(self, host: str, world_size: int) -> None:
        # A socket of our own, because a store would listen on every interface.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address = (host, int(listener.getsockname()[1]))
        self.store = TCPStore(
            *self.address,
            world_size,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )


def connect_store(address: tuple[str, int], world_size: int) -> Any:
    """The store that rank 0 opened at `address`."""
    return TCPStore(*address, world_size, is_master=False, timeout=TIMEOUT, use_libuv=True)


def join_groups(
    store: Any,
    rank: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    device: torch.device,
    host: str,
    *,
    whole_experts: bool = False,
) -> ParallelGroups:
    """All groups of `rank` in a worker group of stages x ranks; blocks until every rank of the worker group has come.

    `host`: where the store is. The ranks find each other on the interface that leads there.
    """
    tp, pp = tensor_parallel_size, pipeline_parallel_size
    world_size = tp * pp
    if world_size == 1:
        return ParallelGroups()
    _set_environment(host)
    backend = platform_of(device).collectives
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    stages = [range(stage * tp, (stage + 1) * tp) for stage in range(pp)]
    columns = [range(column, world_size, tp) for column in range(tp)]
    return ParallelGroups(
        tp=_own_group(stages, rank, backend) if tp > 1 else RankGroup(),
        pp=_own_group(columns, rank, backend) if pp > 1 else RankGroup(),
        feedback=_own_group(columns, rank, backend) if pp > 1 else RankGroup(),
        ep=_own_group(stages, rank, backend) if whole_experts and tp > 1 else RankGroup(),
    )


def leave_groups() -> None:
    """Close this process's groups, if there are any; idempotent."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a peer that is gone already
            dist.destroy_process_group()


def _set_environment(host: str) -> None:
    """Defaults of the libraries below; what the user has set stays."""
    # Multicast over NVLink needs more of the host than a replica may take (a fabric manager in good health), and a
    # fault in it takes all of the host's GPUs along.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if sys.platform == "linux" and (interface := interface_to(host)) is not None:
        # Gloo would look up this host's name, which often means the loopback interface, or nothing.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_to(host: str) -> str | None:
    """The network interface on which this machine talks to `host` (an IP address, maybe its own); None: unknown."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only looks up the route
            own = ipaddress.ip_address(probe.getsockname()[0])
    except (OSError, ValueError):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        texts = [entry.address.partition("%")[0] for entry in addresses if entry.family == family]
        if own in map(ipaddress.ip_address, texts):
            return name
    return None


def _own_group(groups: Iterable[range], rank: int, backend: str) -> RankGroup:
    """Every rank takes part in making every group; the one that holds `rank`."""
    own = RankGroup()
    for members in groups:
        handle = dist.new_group(list(members), timeout=TIMEOUT, backend=backend)
        if rank in members:
            own = RankGroup(members.index(rank), len(members), handle)
    return own
