"""Snapshots by cadence: what is kept, what is let go, and that every version can be had again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from distribai.core.architectures import manifest_of
from distribai.core.people import HOME, OPERATOR, Principal, Role
from distribai.core.spec import BlobRef, JobSpec, RoundSpec, SnapshotSpec
from distribai.errors import InvalidSpec, NotFound
from distribai.merge.weights import open_weights, weights_hash
from distribai.orchestrator import retention
from distribai.orchestrator.backup import dumping, saving
from distribai.orchestrator.backup.saving import back_up
from distribai.orchestrator.fleet import supplies
from distribai.orchestrator.fleet.delivery import weights_ref
from distribai.orchestrator.jobs import generation, queries
from distribai.orchestrator.people import sight
from distribai.orchestrator.retention import collect, is_settled, let_go
from distribai.orchestrator.rounds import merging
from distribai.orchestrator.rounds.tasks import spec_of
from distribai.store.blobs import blob_key
from distribai.store.statements import facts, holdings, jobs, records, snapshots, work
from distribai.testing.audit import audit
from distribai.training.versions import CanonicalCopy
from tests.orchestrator.harness import World
from tests.orchestrator.test_retention import age, names

ROUNDS = 7
RULE = SnapshotSpec(every=3, keep=1)


async def quiet(world: World, **changes: object) -> JobSpec:
    rounds = RoundSpec(
        inner_steps=2,
        grace_min=2.0,
        grace_max=20.0,
        codec_down="int4",
        **changes,  # type: ignore[arg-type]
    )
    return await world.spec(steps=2 * ROUNDS, rounds=rounds, snapshots=RULE)


async def later(world: World, looks: int = 2) -> None:
    """Let go, wait, and delete."""
    for _ in range(looks):
        await collect(world.grid)
        world.time.now += world.grid.settings.let_go_s + 1
        age(world, seconds=world.grid.settings.let_go_s + 1)


async def present(world: World, job: str) -> list[int]:
    async with world.grid.db.read() as tx:
        return (await snapshots.present(tx, job))[job]


def fetcher(world: World):  # type: ignore[no-untyped-def]
    def fetch(blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        found = {b.sha256: world.root / "blobs" / blob_key(b.sha256) for b in blobs}
        assert all(p.is_file() for p in found.values()), "a newcomer is told of what is not there"
        return found

    return fetch


async def reach_all(world: World, job: str) -> None:
    """A newcomer can have every version, to the recorded hash."""
    async with world.grid.db.read() as tx:
        row = await jobs.get(tx, job)
        assert row is not None
        spec = spec_of(row)
        refs = [await weights_ref(tx, row, v, RULE.every) for v in range(row.version + 1)]
        rows = await jobs.all_versions(tx, job)
    manifest = manifest_of(spec.model.family, spec.model.config)
    for ref, version in zip(refs, rows, strict=True):
        copy = CanonicalCopy(job, manifest, spec.seed, from_seed=True)
        copy.advance(ref, fetcher(world))
        assert copy.hash == ref.weights_hash == version.weights_hash


async def test_a_job_keeps_what_its_rule_says_and_every_version_can_be_had_again(
    any_world: World,
) -> None:
    world = any_world
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    assert await present(world, job) == list(range(ROUNDS + 1)), "nobody has looked yet"
    before = await names(world.grid.blobs)
    rows = {v.version: v for v in await queries.list_versions(world.grid, job)}
    assert await let_go(world.grid) == 5
    assert await let_go(world.grid) == 0
    assert await present(world, job) == [0, 6, 7], "3 is of the cadence, but not of the newest one"
    await collect(world.grid)
    assert await names(world.grid.blobs) == before, "what was let go stays for a while"
    await later(world)
    gone = before - await names(world.grid.blobs)
    # Weights, momentum and what the way down kept, of versions 1 to 5.
    listed = await queries.list_versions(world.grid, job)
    assert [v.version for v in listed if v.weights is None] == [1, 2, 3, 4, 5]
    assert len(gone) == 15
    await reach_all(world, job)
    if world.grid.db.dialect == "sqlite":
        checked = audit(world.root, job)
        assert checked.ok, checked.problems
        assert checked.rounds == ROUNDS
    # What is asked for is made again, to the byte, and goes again.
    wanted = rows[4].weights
    assert await queries.weights_blob(world.grid, job, 4) == (4, wanted)
    assert wanted is not None
    assert await world.grid.blobs.is_whole(wanted)
    assert await queries.weights_blob(world.grid, job, 4) == (4, wanted)
    assert not await is_settled(world.grid, await world.grid.blobs.stat(wanted.sha256))
    await later(world)
    assert not await world.grid.blobs.exists(wanted.sha256)
    assert await queries.weights_blob(world.grid, job, 4) == (4, wanted)


async def test_looks_while_a_job_runs_leave_its_nodes_what_they_were_told(world: World) -> None:
    a = await world.node("a")
    job = await world.job(await quiet(world))
    for number in range(ROUNDS):
        task = await a.next_training()
        assert task.round == number
        await later(world)
        fetch = fetcher(world)
        fetch([b for b in (task.base.snapshot,) if b is not None])
        fetch(u.blob for u in task.base.updates)
        await reach_all(world, job)
        await a.work()
        await world.settle()
        if number == 3:
            sample = await generation.request_generation(world.grid, job, 2, "a", 5, 0.5, 1)
            await world.settle()
    async with world.grid.db.read() as tx:
        row = await work.get_task(tx, sample)
    assert row is not None
    checked = audit(world.root, job)
    assert not [p for p in checked.problems if p.startswith("round")], checked.problems


async def test_a_newcomer_of_an_older_version_gets_the_last_snapshot_and_the_updates_since(
    world: World,
) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    await let_go(world.grid)
    async with world.grid.db.read() as tx:
        row = await jobs.get(tx, job)
        assert row is not None
        newest = await weights_ref(tx, row, 7, RULE.every)
        older = await weights_ref(tx, row, 5, RULE.every)
        whole = await jobs.version(tx, job, 6)
    assert whole is not None
    assert (newest.snapshot_version, newest.kept and newest.kept.version) == (7, 6)
    assert newest.kept is not None
    assert newest.kept.blob.sha256 == whole.weights_sha
    assert (older.snapshot, older.snapshot_version) == (None, 0), "version 0 is made from the seed"
    assert [u.version for u in older.updates] == [1, 2, 3, 4, 5]


async def test_what_was_let_go_and_is_named_again_stays(world: World) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    (four,) = [v for v in await queries.list_versions(world.grid, job) if v.version == 4]
    assert four.weights is not None
    await let_go(world.grid)
    spec = await quiet(world)
    later_job = await world.job(
        replace(spec, name="tuned", model=replace(spec.model, init=four.weights))
    )
    await later(world, 3)
    assert await world.grid.blobs.exists(four.weights.sha256)
    assert await world.run_job(later_job) == "completed"


async def test_a_look_that_died_half_way_is_finished_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    await collect(world.grid)
    world.time.now += world.grid.settings.let_go_s + 1
    age(world, seconds=world.grid.settings.let_go_s + 1)
    delete, count = world.grid.blobs.delete, 0

    async def dying(sha256: str) -> None:
        nonlocal count
        count += 1
        await delete(sha256)
        if count == 5:
            raise RuntimeError("killed")

    monkeypatch.setattr(world.grid.blobs, "delete", dying)
    with pytest.raises(RuntimeError):
        await collect(world.grid)
    monkeypatch.setattr(world.grid.blobs, "delete", delete)
    assert (await collect(world.grid)).blobs == 10
    async with world.grid.db.read() as tx:
        assert await snapshots.let_go_until(tx, world.time.now) == []
    await reach_all(world, job)


async def test_a_backup_that_meets_a_look_reads_the_rows_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    async with world.grid.db.write() as tx:
        await facts.put_once(tx, "grid_id", world.grid.grid_id)
    real, looks = dumping.dump, 0

    async def dump(*args: object) -> object:
        nonlocal looks
        looks += 1
        found = await real(*args)  # type: ignore[arg-type]
        if looks == 1:
            await later(world)
        return found

    monkeypatch.setattr(saving, "dump", dump)
    settings = replace(world.grid.settings, db=world.url)
    saved = await back_up(settings, tmp_path / "backup")
    assert looks == 2
    assert saved.manifest.lost == ()
    assert len(os.listdir(tmp_path / "backup" / "snapshots")) == 1


async def test_a_merge_whose_base_another_replica_has_let_go_pauses_nothing(world: World) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    async with world.grid.db.read() as tx:
        row = await work.get_round(tx, job, 3, 0)
    assert row is not None
    await merging._rest(world.grid, row, NotFound("blob.unknown", "There is no blob here."))
    assert (await queries.show_job(world.grid, job)).state == "completed"


async def test_a_grid_whose_operator_wants_all_keeps_all(world: World) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    world.grid.settings = replace(world.grid.settings, let_go_s=0.0)
    assert await let_go(world.grid) == 0


async def test_a_job_that_wants_more_than_the_grid_keeps_is_refused(world: World) -> None:
    world.grid.settings = replace(world.grid.settings, max_snapshots=5)
    with pytest.raises(InvalidSpec, match="at most 5"):
        await world.job(await world.spec(snapshots=SnapshotSpec(every=2, keep=6)))
    with pytest.raises(InvalidSpec, match=r"snapshots\.every is 65"):
        await world.job(await world.spec(snapshots=SnapshotSpec(every=65)))


async def test_the_stored_file_of_a_version_that_is_made_again_is_checked(world: World) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    await later(world)
    number, ref = await queries.weights_blob(world.grid, job, 5)
    async with world.grid.db.read() as tx:
        row = await jobs.get(tx, job)
        version = await jobs.version(tx, job, number)
    assert row is not None
    assert version is not None
    spec = spec_of(row)
    manifest = manifest_of(spec.model.family, spec.model.config)
    async with world.grid.blobs.local(ref) as path:
        assert weights_hash(manifest, open_weights(path, manifest)) == version.weights_hash


@pytest.mark.parametrize("kind", ["operator", "member"])
async def test_an_upload_of_what_was_let_go_stays_like_any_other_upload(
    world: World, kind: str
) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    (four,) = [v.weights for v in await queries.list_versions(world.grid, job) if v.version == 4]
    assert four is not None
    async with world.grid.blobs.local(four) as path:
        data = path.read_bytes()
    await let_go(world.grid)
    let_go_s, orphans_s = world.grid.settings.let_go_s, world.grid.settings.orphans_s
    world.time.now += let_go_s - 1
    age(world, seconds=let_go_s - 1)
    roles = {HOME: Role.OPERATOR} if kind == "operator" else {}
    caller = Principal("account", "", OPERATOR, kind, "key_x", roles)
    await world.grid.blobs.put_bytes(data)
    await sight.has_sent(world.grid, caller, four)
    assert await is_settled(world.grid, await world.grid.blobs.stat(four.sha256))
    for _ in range(3):
        world.time.now += let_go_s + 1
        age(world, seconds=let_go_s + 1)
        await collect(world.grid)
    assert await world.grid.blobs.exists(four.sha256)
    age(world, seconds=orphans_s)
    await collect(world.grid)
    assert not await world.grid.blobs.exists(four.sha256), "nobody has used it"


async def test_what_is_lent_while_a_look_deletes_goes_by_its_own_date(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.node("a")
    job = await world.job(await quiet(world))
    assert await world.run_job(job) == "completed"
    let_go_s = world.grid.settings.let_go_s
    await let_go(world.grid)
    world.time.now += let_go_s + 1
    age(world, seconds=let_go_s + 1)
    real, lent = retention._put_again, []

    async def meanwhile(*args: object) -> bool:
        if not lent:
            lent.append((await queries.weights_blob(world.grid, job, 5))[1])
        return await real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(retention, "_put_again", meanwhile)
    await collect(world.grid)
    (ref,) = lent
    assert await world.grid.blobs.exists(ref.sha256)
    async with world.grid.db.read() as tx:
        row = await records.blob(tx, ref.sha256)
    assert row is not None
    assert row.let_go_at == world.time.now
    await later(world)
    assert not await world.grid.blobs.exists(ref.sha256)


async def test_who_might_fetch_a_snapshot_may_go_on_when_it_was_let_go(any_world: World) -> None:
    world = any_world
    a = await world.node("a")
    job = await world.job(await quiet(world))
    while (await queries.show_job(world.grid, job)).version < 5:
        await world.settle()
        world.time.now += 1
        await a.work()
    await a.next_training()
    async with world.grid.db.read() as tx:
        four = await jobs.version(tx, job, 4)
        row = await jobs.get(tx, job)
    assert four is not None
    assert row is not None

    async def may(sha256: str) -> set[bool]:
        async with world.grid.db.read() as tx:
            seen = await holdings.blob_of_jobs(tx, sha256, {row.organization_id})
        return {seen, await supplies.may_fetch(world.grid, a.id, sha256, job)}

    assert await may(four.weights_sha) == {True}
    await let_go(world.grid)
    assert 4 not in await present(world, job)
    assert await may(four.weights_sha) == {True}
    assert await may(four.outer_sha) == {False}, "an outer state is nobody's to fetch"
    async with world.grid.db.read() as tx:
        assert not await holdings.blob_of_jobs(tx, four.weights_sha, {"org_other"})
    await later(world)
    assert await may(four.weights_sha) == {False}
