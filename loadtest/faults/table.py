"""Every fault, by its name: one file for each family of them, and one line here."""

from __future__ import annotations

from loadtest.faults import clients, deploys, gcs, harmful, machine, network, pressure, signals, soak
from loadtest.faults.fault import Fault

_FAMILIES = (signals, gcs, clients, pressure, harmful, deploys, machine, network, soak)

FAULTS: dict[str, Fault] = {fault.name: fault for family in _FAMILIES for fault in family.FAULTS}
