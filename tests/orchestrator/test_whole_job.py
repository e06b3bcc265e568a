from __future__ import annotations

from pathlib import Path

from distribai.core.architectures import manifest_of
from distribai.core.plain import from_plain
from distribai.core.ranges import SampleRange, normalize
from distribai.core.spec import RoundSpec
from distribai.merge.delta import open_delta
from distribai.merge.manifests import RoundManifest, replay_round
from distribai.orchestrator.jobs import queries
from distribai.store.statements import jobs, work
from tests.orchestrator.harness import World


async def consumed(world: World, job_id: str) -> list[SampleRange]:
    """Positions of accepted training tasks."""
    tasks = (await queries.list_tasks(world.grid, job_id)).items
    return [r for t in tasks if t.phase == "train" and t.state == "accepted" for r in t.samples]


def path(world: World, sha256: str) -> Path:
    """Where a blob lies."""
    return world.root / "blobs" / "sha256" / sha256[:2] / sha256


async def assert_every_position_once(world: World, job_id: str) -> None:
    """What accepted work consumed and what the pool still holds are all positions, once each."""
    async with world.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        assert job is not None
        pool = jobs.pool_of(job)
    everything = normalize([*await consumed(world, job_id), *pool.returned])
    assert everything == (SampleRange(0, pool.cursor),)


async def test_a_job_runs_its_rounds_on_both_databases(any_world: World) -> None:
    world = any_world
    for name in ("a", "b", "c"):
        await world.node(name)
    job_id = await world.job()
    assert await world.run_job(job_id) == "completed"
    record = await queries.show_job(world.grid, job_id)
    assert record.version == record.rounds_total == 3
    assert record.tokens == 3 * 3 * 2 * 2 * 8
    assert [h.loss is not None for h in record.held_out][-1]
    assert await consumed(world, job_id) == [
        SampleRange(start, start + 4) for start in range(0, 36, 4)
    ]
    await assert_every_position_once(world, job_id)
    rounds = await queries.list_rounds(world.grid, job_id)
    assert [(r.number, r.state, r.accepted) for r in rounds] == [(n, "merged", 3) for n in range(3)]
    kinds = [e.kind for e in await queries.list_events(world.grid, job_id)]
    assert kinds.count("task.accepted") >= 10
    assert [k for k in kinds if k.startswith("job.")] == [
        "job.submitted",
        "job.queued",
        "job.running",
        "job.completed",
    ]


async def test_every_round_can_be_replayed_bit_for_bit(world: World) -> None:
    for name in ("a", "b"):
        await world.node(name)
    dense = RoundSpec(inner_steps=2, codec_up="fp32", codec_down="fp32")
    job_id = await world.job(rounds=dense)
    await world.run_job(job_id)
    async with world.grid.db.read() as tx:
        job = await jobs.get(tx, job_id)
        assert job is not None
        for number in range(3):
            row = await work.get_round(tx, job_id, number, 0)
            base = await jobs.version(tx, job_id, number)
            new = await jobs.version(tx, job_id, number + 1)
            assert row is not None
            assert base is not None
            assert new is not None
            record = from_plain(RoundManifest, row.manifest)
            manifest = manifest_of(job.spec["model"]["family"], job.spec["model"]["config"])
            replay = replay_round(
                manifest,
                record,
                path(world, base.weights_sha),
                path(world, base.outer_sha) if base.outer_sha else None,
                [open_delta(path(world, s.delta.sha256), manifest, {}) for s in record.submissions],
            )
            assert replay.ok, replay.problems
            assert replay.weights_hash == new.weights_hash
