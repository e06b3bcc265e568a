"""Goodput under churn: the production orchestrator in the simulated grid, against simpler policies.

*Home*: sixteen machines, rounds of ten minutes, one failure per three rounds and machine, half of
them losing the disk and the key with it. The same machines and the same failures under three
policies: ours (the defaults), waiting for all (quorum 1, nobody is asked to finish early), and a
fixed time-out (a set grace after the quorum); with both of these late work is lost. *Cluster*: the
setting of torchft's experiment, 32 machines, a process killed every 29 s, rounds of about a minute;
what is killed keeps its disk, and one of our rounds is what 500 of its steps are.

Goodput is tokens merged over tokens that the living machines could have computed in that time; a
token that was merged a version late is one, whatever it weighed, and their share is told. The
ceiling is what perfect recovery makes of the same failures in the same rounds: a machine that keeps
its disk loses the steps since its last checkpoint, one that does not loses what it did in the
round, and nothing is ever waited for, sent, or noticed late.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from bench import common
from distribai.core.plain import to_plain
from distribai.core.spec import RoundSpec
from distribai.testing.simulation import Fleet, Outcome, Payload, Scenario, simulate

NAME = "churn"
HELP = "goodput of a simulated grid whose machines come and go, against simpler policies"

STEPS = 500
"""Inner steps of a round."""

ROUND_S = {"home": 600.0, "cluster": 60.0}

FIXED_S = 0.1
"""The fixed time-out, over the length of a round."""

FLEETS = {
    "home": Fleet(
        count=16,
        step_s=ROUND_S["home"] / STEPS,
        noise=0.02,
        between_s=3 * ROUND_S["home"],
        lose_disk=0.5,
        down_s=30.0,
        up=2.5e6,
        down=12.5e6,
        checkpoint_steps=10,
    ),
    "cluster": Fleet(
        count=32,
        step_s=ROUND_S["cluster"] / STEPS,
        noise=0.003,
        between_s=32 * 29.0,
        lose_disk=0.0,
        down_s=10.0,
        down_spread=0.3,
        up=1.25e8,
        down=1.25e8,
        latency_s=0.001,
        checkpoint_steps=10,
    ),
}
PAYLOAD = Payload(delta=6e6, update=6e6, snapshot=6e6)
"""Bytes of the profile ``small``, 1.5M parameters, in fp32."""

POLICIES = {
    "ours": (RoundSpec(), True),
    "wait_for_all": (RoundSpec(quorum=1.0, staleness=0), False),
    "fixed_timeout": (RoundSpec(quorum=0.5, staleness=0), False),
}

Run = tuple[str, str, int]
"""Setting, policy, seed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each setting")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each run")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate both settings under every policy that they are compared with."""
    seeds, rounds = (1, 3) if args.quick else (args.seeds, args.rounds)
    runs = [
        (setting, policy, seed)
        for seed in range(1, seeds + 1)
        for setting in FLEETS
        for policy in (POLICIES if setting == "home" else ("ours",))
    ]
    scenarios = [scenario(*r, rounds, args.quick) for r in runs]
    with ProcessPoolExecutor(
        max(1, args.processes), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        outcomes = dict(zip(runs, pool.map(_simulate, scenarios), strict=True))
    figures = {f"{s} {p}": [outcomes[s, p, i] for i in range(1, seeds + 1)] for s, p, _ in runs}
    _print(figures)
    return _result(figures, seeds, rounds, args.quick)


def scenario(setting: str, policy: str, seed: int, rounds: int, quick: bool) -> Scenario:
    """One run: machines and their failures follow from setting and seed alone."""
    fleet, length = FLEETS[setting], ROUND_S[setting]
    if quick and setting == "home":
        # Half the machines in half the time: the same failures per round and machine.
        length /= 2
        fleet = replace(fleet, count=8, step_s=fleet.step_s / 2, between_s=fleet.between_s / 2)
    spec, obedient = POLICIES[policy]
    spec = replace(spec, inner_steps=STEPS)
    if policy == "fixed_timeout":
        spec = replace(spec, grace_min=FIXED_S * length, grace_max=FIXED_S * length)
    return Scenario(
        # Twice as long as the rounds should take; who is slower than that is not compared.
        machines=fleet.draw(seed, 20 * rounds * length),
        rounds=spec,
        count=rounds,
        seed=seed,
        payload=PAYLOAD,
        read_s=0.01,
        write_s=0.05,
        obedient=obedient,
        horizon_s=20 * rounds * length,
    )


def _simulate(scenario: Scenario) -> Outcome:
    outcome = replace(simulate(scenario), events=())
    if outcome.version < scenario.count:
        raise RuntimeError(f"the job did not end: {outcome.state} at version {outcome.version}")
    return outcome


def _print(figures: Mapping[str, Sequence[Outcome]]) -> None:
    common.table(
        ["setting", "goodput", "of ceiling", "ceiling", "computed", "late", "seconds a round"],
        [
            [
                name,
                _median([o.goodput for o in found]),
                _median([o.goodput / o.ceiling for o in found]),
                _median([o.ceiling for o in found]),
                _median([o.computed / o.possible for o in found]),
                _median([o.late / o.tokens for o in found]),
                _median([_round_s(o) for o in found]),
            ]
            for name, found in figures.items()
        ],
    )
    common.say(
        "goodput: tokens merged over tokens that the living machines could have computed; "
        "computed: all tokens trained, whether or not they counted; the rest is waiting and "
        "moving bytes; late: share of the merged tokens that came a version late and weighed less."
    )


def _result(
    figures: Mapping[str, Sequence[Outcome]], seeds: int, rounds: int, quick: bool
) -> dict[str, Any]:
    ours, cluster = figures["home ours"], figures["cluster ours"]
    waits, fixed = figures["home wait_for_all"], figures["home fixed_timeout"]
    goodputs = [o.goodput for o in ours]
    spread = (max(goodputs) - min(goodputs)) / _median(goodputs)
    rivals = [max(w.goodput, f.goodput) for w, f in zip(waits, fixed, strict=True)]
    return {
        "goodput": _median(goodputs),
        "goodput_wait_for_all": _median([o.goodput for o in waits]),
        "goodput_fixed_timeout": _median([o.goodput for o in fixed]),
        "ceiling": _median([o.ceiling for o in ours]),
        "of_ceiling": _median([o.goodput / o.ceiling for o in ours]),
        "worst_lead": min(a - b for a, b in zip(goodputs, rivals, strict=True)),
        "late_share": _median([o.late / o.tokens for o in ours]),
        "cluster_goodput": _median([o.goodput for o in cluster]),
        "cluster_ceiling": _median([o.ceiling for o in cluster]),
        "settings": {
            "fleets": {name: _plain(asdict(fleet)) for name, fleet in FLEETS.items()},
            "payload": asdict(PAYLOAD),
            "policies": {name: to_plain(spec) for name, (spec, _) in POLICIES.items()},
            "fixed_s": FIXED_S,
            "rounds": rounds,
            "seeds": seeds,
            "quick": quick,
        },
        "samples": {
            name: [float(f"{o.goodput:.6g}") for o in found] for name, found in figures.items()
        },
        "spread": spread,
        "noisy": False,
        "notes": [
            "virtual time: nothing that runs beside it changes a figure; spread is over seeds",
        ],
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if v != float("inf") else None for k, v in values.items()}


def _round_s(outcome: Outcome) -> float:
    ends = outcome.boundaries
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
