"""What a grid's records must show after a job, whatever died while it ran; from files alone.

:func:`audit` reads the database and the blobs of a grid, by their own means and not the
orchestrator's, and lists everything that must not be:

- a sample position that was consumed twice by accepted work, or by none and is not in the pool;
- accepted work that is in no merged round, or in its round's manifest not exactly once, or that
  started from other bits than its version's;
- a round that, computed again from its base, its momentum, what the way down had kept, and the
  accepted deltas, does not give the recorded weights, momentum, update and rest bit for bit: hence
  what died in between has left no trace;
- a version whose file, update or place in the lineage does not fit; a file that is not its hash;
  a version without a snapshot that the lineage does not lead to (its file is made again here);
- a task that has not ended exactly once, or whose acceptance is not exactly one event; likewise a
  round's merge.

The orchestrators may still run, as long as the job has ended.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribai.core.architectures import manifest_of
from distribai.core.plain import fingerprint, from_plain
from distribai.core.spec import BlobRef, JobSpec
from distribai.core.states import TASK, TaskState, is_terminal
from distribai.core.tensors import ParameterManifest
from distribai.errors import DistribAIError
from distribai.merge.delta import Delta, open_delta
from distribai.merge.feedback import Feedback
from distribai.merge.manifests import RoundManifest, VersionManifest, replay_round
from distribai.merge.outer import UpdateHeader, merge_files
from distribai.merge.update import apply_update
from distribai.merge.weights import open_weights, weights_hash
from distribai.store.blobs import blob_key, check_blob, hash_file


@dataclass(frozen=True, slots=True)
class Audit:
    """``rounds`` were computed again from ``submissions``; ``problems`` are sentences."""

    rounds: int
    submissions: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it must be."""
        return not self.problems


_Row = Mapping[str, Any]
"""Columns by name; JSON as text."""

_QUERIES = {
    "jobs": "select * from jobs where id = $1",
    "tasks": "select * from tasks where job_id = $1 order by seq",
    "submissions": "select * from submissions where job_id = $1 order by task_id",
    "versions": "select * from versions where job_id = $1",
    "rounds": "select * from rounds where job_id = $1 order by number, take",
    "events": "select * from outbox where job_id = $1 order by id",
}

_ENDS = {f"task.{state}" for state in TaskState if is_terminal(TASK, state)}


@dataclass(frozen=True, slots=True)
class _Records:
    """The rows of one job."""

    job: _Row
    tasks: list[_Row]
    submissions: list[_Row]
    versions: dict[int, _Row]
    rounds: list[_Row]
    events: list[_Row]

    @property
    def merged(self) -> list[_Row]:
        return [row for row in self.rounds if row["state"] == "merged"]

    @property
    def trained(self) -> list[_Row]:
        return [row for row in self.submissions if row["phase"] == "train"]


def audit(state: Path, job_id: str, blobs: Path | None = None, database: str = "") -> Audit:
    """Look at one ended job.

    Args:
        state: the orchestrator's state directory, with ``grid.sqlite3``.
        job_id: the job's whole id.
        blobs: where the blobs lie; ``<state>/blobs`` by default.
        database: the URL of a PostgreSQL database to read in place of ``grid.sqlite3``. Not to be
            called where an event loop runs then.

    Raises:
        ValueError: there is no such job.
        OSError: the files or the database cannot be read.
    """
    rows = asyncio.run(_postgres(database, job_id)) if database else _sqlite(state, job_id)
    if not rows["jobs"]:
        raise ValueError(f"there is no job {job_id} in {database or state}")
    records = _Records(
        job=rows["jobs"][0],
        tasks=rows["tasks"],
        submissions=rows["submissions"],
        versions={row["version"]: row for row in rows["versions"]},
        rounds=rows["rounds"],
        events=rows["events"],
    )
    spec = from_plain(JobSpec, json.loads(records.job["spec"]))
    manifest = manifest_of(spec.model.family, spec.model.config)
    problems = [*_positions(records), *_work(records, spec), *_ends(records)]
    with tempfile.TemporaryDirectory(prefix="audit-") as made:
        files = _Files(state / "blobs" if blobs is None else blobs, Path(made))
        for row in records.merged:
            problems += _round(records, files, spec, manifest, row)
    return Audit(len(records.merged), len(records.trained), tuple(problems))


def _sqlite(state: Path, job_id: str) -> dict[str, list[_Row]]:
    db = sqlite3.connect(f"file:{state / 'grid.sqlite3'}?mode=ro", uri=True)
    db.row_factory = sqlite3.Row
    try:
        return {
            name: [dict(row) for row in db.execute(query.replace("$1", "?"), (job_id,))]
            for name, query in _QUERIES.items()
        }
    finally:
        db.close()


async def _postgres(url: str, job_id: str) -> dict[str, list[_Row]]:
    import asyncpg  # a grid on SQLite needs no driver for it

    db = await asyncpg.connect(url)
    try:
        return {
            name: [dict(row) for row in await db.fetch(query, job_id)]
            for name, query in _QUERIES.items()
        }
    finally:
        await db.close()


@dataclass(frozen=True, slots=True)
class _State:
    """Files of one version; momentum and residual as far as there are any."""

    theta: Path
    momentum: Path | None
    residual: Path | None


class _Files:
    """The blobs, each checked against its name once; and the files of versions that keep none,
    made again in ``folder``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self.folder = folder
        self._checked: set[BlobRef] = set()

    def state(self, row: _Row) -> _State:
        """The whole files of a version.

        Raises:
            Integrity: the bytes of one are not what its name says.
            OSError: one is not there.
        """
        if not row["weights_sha"]:
            paths = [
                self.folder / f"{row['version']}.{name}"
                for name in ("theta", "momentum", "residual")
            ]
            return _State(paths[0], paths[1], paths[2] if row["residual_hash"] else None)
        return _State(
            self.path(row["weights_sha"], row["weights_size"]),
            self.path(row["outer_sha"], row["outer_size"]) if row["outer_sha"] else None,
            self.path(row["residual_sha"], row["residual_size"]) if row["residual_sha"] else None,
        )

    def path(self, sha256: str, size: int) -> Path:
        """Where it lies.

        Raises:
            Integrity: its bytes are not what its name says.
        """
        ref, path = BlobRef(sha256, size), self._root / blob_key(sha256)
        if ref not in self._checked:
            check_blob(hash_file(path), ref, f"blob {sha256[:12]}")
            self._checked.add(ref)
        return path


def _positions(records: _Records) -> Iterator[str]:
    """Consumed and returned ranges lie end to end, from 0 to the pool's cursor."""
    ranges = [tuple(r) for row in records.trained for r in json.loads(row["samples"])]
    ranges += [tuple(r) for r in json.loads(records.job["pool_returned"])]
    at = 0
    for start, stop in sorted(ranges):
        if start > at:
            yield f"the sample positions {at} to {start} were lost"
        elif start < at:
            yield f"the sample positions {start} to {min(at, stop)} were consumed twice"
        at = max(at, stop)
    if at != records.job["pool_cursor"]:
        yield f"positions end at {at}, {records.job['pool_cursor']} were handed out"


def _work(records: _Records, spec: JobSpec) -> Iterator[str]:
    """Accepted work is in a merged round, started from its version, and is not too late."""
    merged = {(row["number"], row["take"]) for row in records.merged}
    for row in records.trained:
        if (row["round"], row["take"]) not in merged:
            yield f"the accepted work of {row['task_id']} is in no merged round"
        number = row["base_version"]
        version = records.versions.get(number)
        base = json.loads(row["outcome"])["base_hash"]
        if version is None or base != version["weights_hash"]:
            yield f"the work of {row['task_id']} did not start from version {number}"
        if not 0 <= row["round"] - number <= spec.rounds.staleness:
            yield f"the work of {row['task_id']} on version {number} is in round {row['round']}"


def _ends(records: _Records) -> Iterator[str]:
    """Everything has ended, and each acceptance and merge was told once."""
    for task in records.tasks:
        if not is_terminal(TASK, TaskState(task["state"])):
            yield f"the task {task['id']} is still {task['state']}"
    ends = Counter(e["task_id"] for e in records.events if e["kind"] in _ENDS)
    for task in records.tasks:
        if ends[task["id"]] != 1:
            yield f"the end of the task {task['id']} was told {ends[task['id']]} times"
    told = Counter(e["task_id"] for e in records.events if e["kind"] == "task.accepted")
    kept = Counter(row["task_id"] for row in records.submissions)
    accepted = Counter(task["id"] for task in records.tasks if task["state"] == "accepted")
    for task_id in sorted(told | kept | accepted):
        if not told[task_id] == kept[task_id] == accepted[task_id] == 1:
            yield (
                f"the task {task_id} was accepted {accepted[task_id]} times, with "
                f"{kept[task_id]} submissions and {told[task_id]} events"
            )
    merges = Counter(
        json.loads(e["data"])["round"] for e in records.events if e["kind"] == "round.merged"
    )
    if merges != Counter(row["number"] for row in records.merged):
        yield f"merges were told as {dict(merges)}"
    numbers = [row["number"] for row in records.merged]
    if numbers != list(range(records.job["version"])):
        yield f"version {records.job['version']} came of the rounds {numbers}"
    if sorted(records.versions) != list(range(records.job["version"] + 1)):
        yield f"the versions are {sorted(records.versions)}"


def _round(
    records: _Records,
    files: _Files,
    spec: JobSpec,
    manifest: ParameterManifest,
    row: _Row,
) -> Sequence[str]:
    name = f"round {row['number']}"
    base, new = records.versions.get(row["number"]), records.versions.get(row["number"] + 1)
    if base is None or new is None:
        return [f"{name} lacks its versions"]
    record = from_plain(RoundManifest, json.loads(row["manifest"]))
    key = (row["number"], row["take"])
    accepted = Counter(r["task_id"] for r in records.trained if (r["round"], r["take"]) == key)
    if Counter(s.task_id for s in record.submissions) != accepted:
        return [f"{name} merged other work than was accepted for it"]
    # Of what is stored, not of what this program makes of it: it may know more fields.
    origin = from_plain(VersionManifest, json.loads(new["manifest"])).round_hash
    if origin != fingerprint(json.loads(row["manifest"])):
        return [f"{name}: the version names another round as its origin"]
    based = {r["task_id"]: r["base_version"] for r in records.trained}
    if any(row["number"] - s.staleness != based[s.task_id] for s in record.submissions):
        return [f"{name} merged work on another version than was accepted"]
    if all(s.staleness for s in record.submissions):
        return [f"{name} merged nothing but late work"]
    if record.codec_down != spec.codec_down_of(row["number"]):
        return [f"{name} sent its update as {record.codec_down}, which is not the job's"]
    try:
        return [f"{name}: {problem}" for problem in _replay(files, manifest, record, base, new)]
    except (DistribAIError, ValueError, OSError) as problem:
        return [f"{name}: {problem}"]


def _replay(
    files: _Files,
    manifest: ParameterManifest,
    record: RoundManifest,
    base: _Row,
    new: _Row,
) -> Iterator[str]:
    if (record.base_hash, record.base_momentum_hash) != (base["weights_hash"], base["outer_hash"]):
        yield "it started from other weights or momentum than its version's"
    if (record.weights_hash, record.momentum_hash) != (new["weights_hash"], new["outer_hash"]):
        yield "its weights or momentum are not those of the version that it made"
    kept = (base["residual_hash"], new["residual_hash"])
    if (record.base_residual_hash, record.residual_hash) != kept:
        yield "what it kept is not what its versions have"
    start = files.state(base)
    deltas = [
        open_delta(
            files.path(s.delta.sha256, s.delta.size),
            manifest,
            {
                "task_id": s.task_id,
                "attempt": s.attempt,
                "base_version": record.round - s.staleness,
            },
        )
        for s in record.submissions
    ]
    update = files.path(new["update_sha"], new["update_size"])
    yield from replay_round(
        manifest,
        record,
        start.theta,
        start.momentum,
        deltas,
        residual=start.residual,
        update=update,
    ).problems
    if not new["weights_sha"]:
        _make_again(files, manifest, record, start, deltas, new)
    stored = open_weights(files.state(new).theta, manifest)
    if weights_hash(manifest, stored) != record.weights_hash:
        yield "the stored weights are not the recorded ones"
    expected: dict[str, str | int] = {"job_id": record.job_id, "version": record.round + 1}
    led = apply_update(manifest, open_weights(start.theta, manifest), update, expect=expected)
    if weights_hash(manifest, led) != record.weights_hash:
        yield "its update does not lead to its weights"
    if not base["weights_sha"]:
        for path in files.folder.glob(f"{base['version']}.*"):
            path.unlink()


def _make_again(
    files: _Files,
    manifest: ParameterManifest,
    record: RoundManifest,
    start: _State,
    deltas: list[Delta],
    new: _Row,
) -> None:
    """The files of a version that keeps no snapshot, for the next round's replay."""
    out = files.folder / str(new["version"])
    feedback = None
    if record.residual_hash:
        feedback = Feedback(start.residual, out.with_suffix(".residual"))
    merge_files(
        manifest,
        start.theta,
        start.momentum,
        deltas,
        [s.tokens for s in record.submissions],
        float.fromhex(record.choices.eta),
        float.fromhex(record.choices.mu),
        out_theta=out.with_suffix(".theta"),
        out_momentum=out.with_suffix(".momentum"),
        out_update=out.with_suffix(".update"),
        header=UpdateHeader(record.job_id, record.round + 1, manifest.hash, record.codec_down),
        staleness=[s.staleness for s in record.submissions],
        feedback=feedback,
    )
