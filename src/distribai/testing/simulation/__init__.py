"""A simulated grid: the production orchestrator, virtual machines, virtual time, from a seed.

::

    from distribai.core.spec import RoundSpec
    from distribai.testing.simulation import Fleet, Scenario, simulate

    fleet = Fleet(count=8, step_s=0.5, noise=0.02, between_s=300, lose_disk=0.5, down_s=60)
    scenario = Scenario(fleet.draw(seed=1, horizon_s=3600), RoundSpec(inner_steps=200), count=3)
    outcome = simulate(scenario)
    print(f"{outcome.goodput:.3f} of {outcome.ceiling:.3f}")

Scheduler, rounds, verdicts, merges, store, registration and messages are the product's own; so are
its reaction times: ticks, hints, patience with silent nodes. What is virtual are the machines and
their links, and time.
"""

from __future__ import annotations

from distribai.testing.simulation.events import Event, read_events, read_log, write_log
from distribai.testing.simulation.grid import Outcome, Scenario, simulate
from distribai.testing.simulation.machines import Fleet, Machine, Outage, capacity, ceiling
from distribai.testing.simulation.replay import machines_of
from distribai.testing.simulation.site import Payload

__all__ = [
    "Event",
    "Fleet",
    "Machine",
    "Outage",
    "Outcome",
    "Payload",
    "Scenario",
    "capacity",
    "ceiling",
    "machines_of",
    "read_events",
    "read_log",
    "simulate",
    "write_log",
]
