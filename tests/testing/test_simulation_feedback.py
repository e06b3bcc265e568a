"""Virtual nodes keep what their deltas did not send, as real ones do: nothing of it is lost."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distribai.core.architectures import manifest_of
from distribai.core.plain import from_plain
from distribai.core.sealed import unseal
from distribai.core.spec import RoundSpec
from distribai.merge.delta import open_delta
from distribai.merge.feedback import open_residual, passing
from distribai.node.feedback import INDEX, Index
from distribai.store.blobs import blob_key
from distribai.testing.audit import audit
from distribai.testing.simulation import Machine, Outage, Payload, Scenario, simulate, work
from distribai.testing.simulation.grid import MICRO

MANIFEST = manifest_of("decoder_transformer", MICRO)
SPECS = passing(MANIFEST).tensors


def flat(path: Path) -> np.ndarray:
    """What a delta says, decoded."""
    packed = open_delta(path, MANIFEST, {}).packed
    return np.concatenate(
        [packed.reader(t)(0, t.size, np.empty(t.size, np.float32)).copy() for t in SPECS]
    )


def test_what_was_sent_and_merged_and_what_is_kept_add_up_to_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: dict[tuple[str, int], np.ndarray] = {}
    write = work.write_delta_with_feedback

    def watched(path, manifest, base, local, header, *rest):  # type: ignore[no-untyped-def]
        learned[header.task_id, header.attempt] = np.concatenate(
            [(base[t.name] - local[t.name]).ravel() for t in SPECS]
        )
        return write(path, manifest, base, local, header, *rest)

    monkeypatch.setattr(work, "write_delta_with_feedback", watched)
    steady = Machine("steady", step_s=1.2, checkpoint_steps=5)
    machines = (
        steady,
        # Its results are seconds on their way; nobody takes late work, so most come to nothing.
        replace(steady, name="far", step_s=1.1, latency_s=4.0),
        # It dies in the second round and keeps its disk.
        replace(steady, name="dying", outages=(Outage(85.0, 60.0),)),
    )
    rounds = RoundSpec(
        inner_steps=50, codec_up="int4", codec_down="int4", grace_max=8.0, staleness=0
    )
    scenario = Scenario(machines, rounds, 4, seed=3, payload=Payload(1e5, 1e5, 1e6), obedient=False)
    outcome = simulate(scenario, tmp_path)
    assert outcome.version == 4, outcome.reason

    rows = sqlite3.connect(tmp_path / "grid.sqlite3")
    rows.row_factory = sqlite3.Row
    accepted = {
        (r["task_id"], r["attempt"]): r
        for r in rows.execute(
            "select s.*, r.state as round_state from submissions s left join rounds r on "
            "r.job_id = s.job_id and r.number = s.round and r.take = s.take where phase = 'train'"
        )
    }
    of_node = {r["id"]: r["node_id"] for r in rows.execute("select id, node_id from tasks")}
    names = {r["id"]: r["name"] for r in rows.execute("select id, name from nodes")}
    merged = {k for k, r in accepted.items() if r["round_state"] == "merged"}
    assert len(learned) > len(merged) > 4, "some of it came to nothing"
    blobs = tmp_path / "blobs"
    there: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(sum(t.size for t in SPECS)))
    for key in merged:
        place = blobs / blob_key(accepted[key]["delta_sha"])
        there[names[accepted[key]["node_id"]]] += flat(place)
    for path in (tmp_path / "nodes").glob(f"*/feedback/*/{INDEX}"):
        name = path.parents[2].name
        index = from_plain(Index, unseal(path.read_bytes()))
        state = index.now if index.before is None else index.before
        if state.kept is not None:
            kept = open_residual(path.parent / f"{state.kept.sha256}.safetensors", MANIFEST)
            there[name] += np.concatenate([kept.arrays[t.name].ravel() for t in SPECS])
        for one in state.sent:
            if one.lost or one.key not in merged:
                there[name] += flat(path.parent / f"{one.delta.sha256}.safetensors")
    total: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(sum(t.size for t in SPECS)))
    for key, values in learned.items():
        total[names[of_node[key[0]]]] += values
    assert there.keys() == total.keys() == {"steady", "far", "dying"}
    for name in total:
        apart = np.abs(total[name] - there[name]).max()
        assert apart < 1e-5, (name, apart)
    (job_id,) = rows.execute("select id from jobs").fetchone()
    problems = [p for p in audit(tmp_path, job_id).problems if p.startswith("round")]
    assert not problems
