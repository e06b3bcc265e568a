"""What a grid's records must show after any job, checked from database and blobs alone.

Every issued sample position was consumed once by accepted work, or came back to the pool; every
accepted submission started from its version's bits; every round replays to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path

from distribai.core.architectures import manifest_of
from distribai.core.plain import fingerprint, from_plain
from distribai.core.spec import JobSpec
from distribai.core.tensors import ParameterManifest
from distribai.merge.delta import open_delta
from distribai.merge.manifests import RoundManifest, VersionManifest, replay_round


def audit(state: Path, job_id: str) -> int:
    """Check one ended job of an orchestrator's state directory; the rounds that were replayed."""
    db = sqlite3.connect(state / "grid.sqlite3")
    db.row_factory = sqlite3.Row
    try:
        job = db.execute("select * from jobs where id = ?", (job_id,)).fetchone()
        submissions = db.execute(
            "select s.* from submissions s where s.job_id = ? and s.phase = 'train'", (job_id,)
        ).fetchall()
        versions = {
            row["version"]: row
            for row in db.execute("select * from versions where job_id = ?", (job_id,))
        }
        rounds = db.execute(
            "select * from rounds where job_id = ? and state = 'merged' order by number", (job_id,)
        ).fetchall()
    finally:
        db.close()
    _check_positions(job, submissions)
    for row in submissions:
        base = json.loads(row["outcome"])["base_hash"]
        assert base == versions[row["round"]]["weights_hash"], row["task_id"]
    spec = from_plain(JobSpec, json.loads(job["spec"]))
    manifest = manifest_of(spec.model.family, spec.model.config)
    for row in rounds:
        _replay(state, manifest, row, versions, submissions)
    assert len(rounds) == job["version"]
    return len(rounds)


def _check_positions(job: sqlite3.Row, submissions: list[sqlite3.Row]) -> None:
    """Consumed and returned ranges lie end to end from 0 to the pool's cursor."""
    ranges = [tuple(r) for row in submissions for r in json.loads(row["samples"])]
    ranges += [tuple(r) for r in json.loads(job["pool_returned"])]
    at = 0
    for start, stop in sorted(ranges):
        assert start == at, f"position {min(start, at)} was {'lost' if start > at else 'doubled'}"
        at = stop
    assert at == job["pool_cursor"]


def _replay(
    state: Path,
    manifest: ParameterManifest,
    row: sqlite3.Row,
    versions: dict[int, sqlite3.Row],
    submissions: list[sqlite3.Row],
) -> None:
    record = from_plain(RoundManifest, json.loads(row["manifest"]))
    base, new = versions[row["number"]], versions[row["number"] + 1]
    assert (record.base_hash, record.weights_hash) == (base["weights_hash"], new["weights_hash"])
    version = from_plain(VersionManifest, json.loads(new["manifest"]))
    assert version.round_hash == fingerprint(record)
    of_round = {
        s["task_id"] for s in submissions if (s["round"], s["take"]) == (row["number"], row["take"])
    }
    assert {s.task_id for s in record.submissions} == of_round
    deltas = []
    for submission in record.submissions:
        path = _blob(state, submission.delta.sha256)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == submission.delta.sha256
        expected = {"task_id": submission.task_id, "attempt": submission.attempt}
        deltas.append(open_delta(path, manifest, expected))
    momentum = _blob(state, base["outer_sha"]) if base["outer_sha"] else None
    replay = replay_round(manifest, record, _blob(state, base["weights_sha"]), momentum, deltas)
    assert replay.ok, replay.problems


def _blob(state: Path, sha256: str) -> Path:
    return state / "blobs" / "sha256" / sha256[:2] / sha256
