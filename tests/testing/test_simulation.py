"""The simulated grid: production code, virtual machines, the same events from the same seed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from distribai.core.spec import RoundSpec
from distribai.testing.simulation import (
    Event,
    Fleet,
    Machine,
    Outage,
    Outcome,
    Payload,
    Scenario,
    machines_of,
    read_log,
    simulate,
    write_log,
)

ROUND_S = 60.0
PAYLOAD = Payload(1e5, 1e5, 1e6)
STEADY = Machine("steady", step_s=ROUND_S / 50, checkpoint_steps=5)
ROUNDS = RoundSpec(inner_steps=50)


def scenario(*machines: Machine, count: int = 2, **changes: object) -> Scenario:
    made = Scenario(machines, ROUNDS, count, payload=PAYLOAD, workers_min=len(machines))
    return replace(made, **changes)  # type: ignore[arg-type]


@cache
def churned() -> Outcome:
    """A few machines that fail all the time."""
    fleet = Fleet(5, ROUND_S / 50, noise=0.05, spread=0.2, between_s=150, lose_disk=0.5, down_s=30)
    return simulate(Scenario(fleet.draw(4, 3600), ROUNDS, 4, seed=4, payload=PAYLOAD))


def kinds(outcome: Outcome) -> Counter[str]:
    return Counter(e.kind for e in outcome.events)


def test_machines_that_never_fail_do_nearly_everything_they_could() -> None:
    outcome = simulate(scenario(STEADY, replace(STEADY, name="second")))
    assert outcome.version == 2
    # Who evaluates meanwhile is behind when the other is done, and hands in what it has.
    assert 0.9 * 2 * 2 * 50 * 8 < outcome.tokens <= 2 * 2 * 50 * 8, "two machines, two rounds"
    assert outcome.ceiling == 1.0
    assert 0.9 < outcome.goodput < 1.0
    assert outcome.computed == pytest.approx(outcome.tokens)
    assert set(outcome.spent) == {"train", "upload", "download", "evaluate"}


def test_the_same_seed_gives_the_same_events() -> None:
    again = churned.__wrapped__()
    assert churned().events == again.events
    assert churned() == again
    assert kinds(churned())["task.requeued"] > 0, "something happened in it"


def test_another_seed_gives_other_events() -> None:
    fleet = Fleet(2, ROUND_S / 50, noise=0.05)
    outcomes = [
        simulate(Scenario(fleet.draw(s, 3600), ROUNDS, 1, seed=s, payload=PAYLOAD)) for s in (1, 2)
    ]
    assert outcomes[0].boundaries != outcomes[1].boundaries


def test_a_machine_that_keeps_its_disk_goes_on_from_its_checkpoint() -> None:
    # It dies in step 31 and is back before anybody misses it.
    dying = replace(STEADY, name="dying", outages=(Outage(5 + 31.5 * 1.2, 10.0),))
    outcome = simulate(scenario(STEADY, dying, count=1))
    assert kinds(outcome)["task.requeued"] == 0
    submitted = [e for e in outcome.events if e.kind == "task.submitted"]
    assert len({e.node_id for e in submitted if e.data["phase"] == "train"}) == 2
    # Less than two steps since the checkpoint at 30 were done again.
    assert 0 < outcome.computed - outcome.tokens < 2 * 8


def test_a_machine_that_loses_disk_and_key_comes_back_as_a_stranger() -> None:
    broken = replace(STEADY, name="broken", outages=(Outage(20, 5, keeps_disk=False),))
    outcome = simulate(scenario(STEADY, broken))
    joined = [e for e in outcome.events if e.kind == "node.joined"]
    assert [e.data["name"] for e in joined].count("broken") == 2
    assert len({e.node_id for e in joined}) == 3
    assert kinds(outcome)["task.requeued"] == 1


def test_a_machine_that_loses_its_disk_alone_is_known_and_its_task_is_free_at_once() -> None:
    outage = Outage(20, 5, keeps_disk=False, keeps_key=True)
    outcome = simulate(scenario(STEADY, replace(STEADY, name="broken", outages=(outage,))))
    assert kinds(outcome)["node.joined"] == 2
    (requeued,) = [e for e in outcome.events if e.kind == "task.requeued"]
    assert requeued.data["reason"] == "its node came back without it"
    assert requeued.at - outcome.events[0].at < 30, "nobody had to wait for its silence"


def test_who_is_asked_to_finish_hands_in_what_it_has() -> None:
    slow = replace(STEADY, name="slow", step_s=3 * STEADY.step_s)
    rounds = replace(ROUNDS, grace_max=5.0)
    obeys = simulate(scenario(STEADY, slow, count=1, rounds=rounds))
    assert 50 * 8 < obeys.tokens < 2 * 50 * 8, "part of the slow one's work counts"
    overhears = simulate(
        scenario(STEADY, slow, count=1, rounds=rounds, obedient=False, workers_min=1)
    )
    assert overhears.tokens == 50 * 8, "its work comes too late"


def test_who_leaves_politely_hands_in_what_it_has() -> None:
    leaver = replace(STEADY, name="leaver", leaves_at=40.0)
    outcome = simulate(scenario(STEADY, leaver, count=1))
    assert 50 * 8 < outcome.tokens < 2 * 50 * 8
    assert kinds(outcome)["task.requeued"] == 0
    assert kinds(outcome)["node.offline"] == 1


def test_who_comes_later_takes_part_from_then_on() -> None:
    late = replace(STEADY, name="late", joins_at=70.0)
    outcome = simulate(scenario(STEADY, late, count=3, workers_min=1))
    opened = [e.data["slots"] for e in outcome.events if e.kind == "round.open"]
    assert opened == [1, 1, 2]


def test_a_link_that_is_slow_costs_its_time() -> None:
    quick = simulate(scenario(STEADY, count=2))
    slow = simulate(scenario(replace(STEADY, up=1e4), count=2))
    assert slow.spent["upload"] == pytest.approx(2 * 1e5 / 1e4, rel=0.05)
    assert slow.goodput < quick.goodput


def test_a_simulation_ends_at_its_horizon_whatever_is_left_to_do() -> None:
    outcome = simulate(scenario(STEADY, count=100, horizon_s=100.0))
    assert outcome.version < 3
    assert outcome.seconds == pytest.approx(100.0, abs=1.0)


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(churned().events, path)
    assert tuple(read_log(path)) == churned().events


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"at": 1.0, "what": "else"}\n')
    with pytest.raises(ValueError, match="not a log"):
        read_log(path)


def test_a_log_is_replayed_with_its_arrivals_departures_and_speeds() -> None:
    half = replace(STEADY, name="half", step_s=2 * STEADY.step_s, joins_at=30.0)
    dying = replace(STEADY, name="dying", outages=(Outage(70.0, 80.0),))
    gone = replace(STEADY, name="gone", outages=(Outage(75.0, 1e5, keeps_disk=False),))
    # Patient, so that the slow one ends its tasks by itself.
    rounds = replace(ROUNDS, quorum=1.0, min_inner_steps=1.0)
    logged = simulate(scenario(STEADY, half, dying, gone, count=3, rounds=rounds, workers_min=1))
    found = machines_of(logged.events, 50, replace(STEADY, step_s=9.9))
    by_start = {round(m.joins_at): m for m in found}
    assert len(found) == 4
    assert by_start[30].step_s == pytest.approx(half.step_s, rel=0.1)
    back = [m for m in found if m.outages]
    assert [round(o.until) for o in back[0].outages] == [150]
    assert back[0].outages[0].at == pytest.approx(70, abs=25), "within a heartbeat and two ticks"
    assert [m.leaves_at == pytest.approx(75, abs=25) for m in found].count(True) == 1
    replayed = simulate(scenario(*found, count=3, rounds=rounds, workers_min=1))
    assert replayed.version == 3
    joins = [e.at for e in replayed.events if e.kind == "node.joined"]
    assert round(joins[-1] - joins[0]) == 30
    assert replayed.goodput == pytest.approx(logged.goodput, abs=0.1)


def test_a_log_without_nodes_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="no node"):
        machines_of([Event(1.0, "job.submitted")], 50, STEADY)


def test_a_machine_that_is_never_heard_again_has_left() -> None:
    events = [
        Event(0.0, "node.joined", node_id="node_a", data={"name": "a"}),
        Event(500.0, "node.offline", node_id="node_a"),
    ]
    (machine,) = machines_of(events, 50, STEADY)
    assert (machine.leaves_at, machine.outages) == (450.0, ())
    assert math.isfinite(machine.leaves_at)
