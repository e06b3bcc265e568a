from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import func, select

from distribai.core.architectures import manifest_of
from distribai.core.spec import BlobRef, DataSpec, ModelSpec
from distribai.errors import Ambiguous, Conflict, DistribAIError, Integrity, NotFound
from distribai.merge.version0 import make_version0
from distribai.merge.weights import write_weights
from distribai.orchestrator.fleet.queries import summary
from distribai.orchestrator.jobs import commands, generation, queries
from distribai.store.tables import datasets, jobs
from tests.orchestrator.harness import MICRO, World


async def rows(world: World) -> int:
    async with world.grid.db.read() as tx:
        return int(await tx.scalar(select(func.count()).select_from(jobs)))


async def test_a_submitted_job_has_its_first_version_and_waits_for_the_operator(
    world: World,
) -> None:
    job_id = await commands.create_job(world.grid, await world.spec(), None, "me")
    record = await queries.show_job(world.grid, job_id)
    assert (record.state, record.version, record.rounds_total) == ("submitted", 0, 3)
    assert record.waiting_for == "the operator's decision"
    assert record.dataset["train_sequences"] > 0
    assert record.plan["rounds"] == 3
    (version,) = await queries.list_versions(world.grid, job_id)
    assert await world.grid.blobs.exists(version.weights.sha256)


async def test_the_same_key_and_spec_are_the_same_job(any_world: World) -> None:
    world = any_world
    spec = await world.spec()
    first = await commands.create_job(world.grid, spec, "key", "me")
    assert await commands.create_job(world.grid, spec, "key", "me") == first
    with pytest.raises(Conflict) as caught:
        await commands.create_job(world.grid, replace(spec, steps=8), "key", "me")
    assert caught.value.code == "http.idempotency"
    assert await commands.create_job(world.grid, spec, None, "me") != first
    assert await rows(world) == 2


async def test_the_same_request_twice_at_once_makes_one_job(any_world: World) -> None:
    import asyncio

    world = any_world
    spec = await world.spec()
    made = await asyncio.gather(
        *(commands.create_job(world.grid, spec, "key", "me") for _ in range(3))
    )
    assert len(set(made)) == 1
    assert await rows(world) == 1


async def test_prepared_data_is_used_again(world: World) -> None:
    spec = await world.spec()
    for changes in ({}, {"steps": 4}, {"seq_len": 16}):
        await commands.create_job(world.grid, replace(spec, **changes), None, "me")  # type: ignore[arg-type]
    async with world.grid.db.read() as tx:
        assert await tx.scalar(select(func.count()).select_from(datasets)) == 2


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"steps": 0}, "spec.steps"),
        ({"workers_min": 3, "workers_max": 2}, "spec.workers"),
        ({"paradigm": "nonsense"}, "spec.paradigm"),
        ({"model": ModelSpec("decoder_transformer", {**MICRO, "heads": 3})}, "spec.model"),
        (
            {"model": ModelSpec("decoder_transformer", MICRO, init=BlobRef("0" * 64, 1))},
            "spec.model",
        ),
        ({"data": DataSpec(source="blobs", files=(BlobRef("0" * 64, 1),))}, "data.missing"),
        ({"data": DataSpec(source="nowhere")}, "data.missing"),
        ({"seq_len": 1 << 19}, "data.too_short"),
    ],
)
async def test_a_spec_that_cannot_be_run_makes_no_job(
    world: World, change: dict[str, object], code: str
) -> None:
    with pytest.raises(DistribAIError) as caught:
        await commands.create_job(world.grid, await world.spec(**change), "key", "me")
    assert caught.value.code == code
    assert await rows(world) == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [(b"", "data.empty"), (b"caf\xe9 " * 100, "data.not_utf8"), (b"short", "data.too_short")],
)
async def test_data_that_cannot_be_trained_on_makes_no_job(
    world: World, text: bytes, code: str
) -> None:
    ref = await world.grid.blobs.put_bytes(text)
    with pytest.raises(DistribAIError) as caught:
        await world.job(data=DataSpec(source="blobs", files=(ref,)))
    assert caught.value.code == code
    assert await rows(world) == 0


async def test_a_model_beyond_the_grids_limit_is_refused(world: World) -> None:
    world.grid.settings = replace(world.grid.settings, max_parameters=10)
    with pytest.raises(DistribAIError) as caught:
        await world.job()
    assert caught.value.code == "spec.model_too_large"


async def test_a_job_can_start_from_the_users_weights(world: World) -> None:
    manifest = manifest_of("decoder_transformer", MICRO)
    path = world.grid.scratch / "mine"
    ref = write_weights(path, manifest, make_version0(manifest, 99), {"note": "mine"})
    await world.grid.blobs.put_file(path, ref)
    model = ModelSpec("decoder_transformer", MICRO, init=ref)
    job_id = await world.job(model=model, steps=2)
    node = await world.node("a")
    await world.settle()
    base = node.only_task().base
    assert base.snapshot is not None
    other = await world.job()
    mine, theirs = [(await queries.list_versions(world.grid, j))[0] for j in (job_id, other)]
    assert mine.weights_hash != theirs.weights_hash
    assert await world.run_job(job_id) == "completed"


async def test_weights_of_another_model_are_refused(world: World) -> None:
    manifest = manifest_of("decoder_transformer", {**MICRO, "ffn_dim": 16})
    path = world.grid.scratch / "mine"
    ref = write_weights(path, manifest, make_version0(manifest, 99))
    await world.grid.blobs.put_file(path, ref)
    with pytest.raises(Integrity) as caught:
        await world.job(model=ModelSpec("decoder_transformer", MICRO, init=ref))
    assert caught.value.code == "tensor.manifest"
    assert await rows(world) == 0


async def test_accepting_and_declining_twice_is_no_error_and_the_other_way_is(
    world: World,
) -> None:
    first = await commands.create_job(world.grid, await world.spec(), None, "me")
    second = await commands.create_job(world.grid, await world.spec(), None, "me")
    for _ in range(2):
        await commands.accept_job(world.grid, first, "op")
        await commands.decline_job(world.grid, second, "not today", "op")
    assert (await queries.show_job(world.grid, second)).reason == "not today"
    with pytest.raises(Conflict, match="declined: it cannot be accepted"):
        await commands.accept_job(world.grid, second, "op")
    with pytest.raises(Conflict, match="queued: it cannot be declined"):
        await commands.decline_job(world.grid, first, "", "op")
    with pytest.raises(Conflict, match="queued: it cannot be paused"):
        await commands.pause_job(world.grid, first, "op")
    with pytest.raises(Conflict, match="queued: it cannot be resumed"):
        await commands.resume_job(world.grid, first, "op")
    with pytest.raises(NotFound):
        await commands.accept_job(world.grid, "job_nothing", "op")


async def test_cancelling_stops_the_nodes_and_ends_everything(world: World) -> None:
    a = await world.node("a")
    job_id = await world.job()
    await world.settle()
    held = a.only_task()
    for _ in range(2):
        await commands.cancel_job(world.grid, job_id, "changed my mind", "op")
    await world.settle()
    assert held.task_id in a.stopped
    assert a.completed[-1].job_done
    record = await queries.show_job(world.grid, job_id)
    assert (record.state, record.reason) == ("cancelled", "changed my mind")
    tasks = (await queries.list_tasks(world.grid, job_id)).items
    assert {t.state for t in tasks} == {"cancelled"}
    await a.fail(held, "task.cancelled", "stopped")
    assert a.acks[-1].code == "task.not_held"
    with pytest.raises(Conflict):
        await commands.resume_job(world.grid, job_id, "op")


async def test_a_job_goes_by_its_id_a_part_of_it_or_its_name(world: World) -> None:
    spec = await world.spec()
    first = await commands.create_job(world.grid, replace(spec, name="first"), None, "me")
    for _ in range(2):
        await commands.create_job(world.grid, replace(spec, name="twin"), None, "me")
    for ref in (first, first[:9], first.removeprefix("job_")[:6], "first"):
        assert await queries.resolve_job(world.grid, ref) == first
    with pytest.raises(Ambiguous) as caught:
        await queries.resolve_job(world.grid, "twin")
    assert caught.value.code == "job.ambiguous"
    assert caught.value.message.count("job_") == 2
    for ref in ("nothing", "job_", first[4:6], ""):
        with pytest.raises(NotFound):
            await queries.resolve_job(world.grid, ref)


async def test_lists_come_in_pages(world: World) -> None:
    spec = await world.spec()
    made = []
    for i in range(5):
        world.time.now += 1
        made.append(await commands.create_job(world.grid, replace(spec, name=str(i)), None, "me"))
    page = await queries.list_jobs(world.grid, limit=2)
    seen = [j.id for j in page.items]
    while page.next_cursor:
        page = await queries.list_jobs(world.grid, limit=2, cursor=page.next_cursor)
        seen += [j.id for j in page.items]
    assert seen == made[::-1]
    assert (await queries.list_jobs(world.grid, state="completed")).items == ()
    events = await queries.list_events(world.grid, None, limit=3)
    rest = await queries.list_events(world.grid, None, after=events[-1].cursor)
    assert [e.job_id for e in (*events, *rest)] == made
    with pytest.raises(DistribAIError):
        await queries.list_jobs(world.grid, cursor="nonsense")


async def test_a_sample_is_generated_by_a_node_and_waited_for(world: World) -> None:
    import asyncio

    a = await world.node("a")
    job_id = await world.job(steps=2)
    await world.run_job(job_id)
    task_id = await generation.request_generation(world.grid, job_id, None, "def ", 5, 0.8, 1)
    waiting = asyncio.create_task(queries.wait_for_task(world.grid, task_id, 100.0))
    await world.settle()
    task = a.only_task("generate")
    assert task.params == {"prompt": "def ", "max_tokens": 5, "temperature": 0.8, "seed": 1}
    assert task.round == 1
    await a.work()
    await world.settle()
    world.grid.wake.set()  # as the duties' loops do after every change
    record = await asyncio.wait_for(waiting, 20)
    assert (record.state, record.text) == ("accepted", "def ...")
    version, blob = await queries.weights_blob(world.grid, job_id, 0)
    assert version == 0
    assert await world.grid.blobs.exists(blob.sha256)
    with pytest.raises(NotFound):
        await generation.request_generation(world.grid, job_id, 9, "", 5, 0.8, 1)
    with pytest.raises(NotFound):
        await queries.weights_blob(world.grid, job_id, 9)
    with pytest.raises(DistribAIError):
        await generation.request_generation(world.grid, job_id, None, "", 0, 0.8, 1)


async def test_waiting_for_a_task_ends_at_its_time(world: World) -> None:
    job_id = await world.job()
    task_id = await generation.request_generation(world.grid, job_id, None, "def ", 5, 0.8, 1)
    assert (await queries.wait_for_task(world.grid, task_id, 0.0)).state == "queued"
    with pytest.raises(NotFound):
        await queries.show_task(world.grid, "task_nothing")
    await generation.withdraw_generation(world.grid, task_id, "nobody waits")
    assert (await queries.show_task(world.grid, task_id)).state == "cancelled"
    await generation.withdraw_generation(world.grid, task_id, "nobody waits")
    node = await world.node("late")
    await world.settle()
    assert "generate" not in {t.phase for t in node.tasks.values()}


async def test_the_log_tells_a_jobs_story_in_sentences(world: World) -> None:
    node = await world.node("a")
    job_id = await world.job()
    await world.settle()
    await node.work()
    await world.settle()
    await commands.cancel_job(world.grid, job_id, "enough.", "operator")
    told = [line.message for line in await queries.list_logs(world.grid, job_id, "", 100)]
    assert told[0] == "The job was submitted by the tester."
    assert told[1] == "The job was accepted by the tester."
    assert told[2] == "The job is running."
    assert told[3] == "Round 1 is open: 1 worker does 2 inner steps."
    assert "Round 1 is merged into version 1 from 1 submission." in told
    assert told[-1] == "The job is cancelled: enough."


async def test_health_tells_what_is_wrong(world: World) -> None:
    assert (await summary(world.grid)).ok
    node = await world.node("a")
    assert (await summary(world.grid)).ok
    await node.heartbeat(intent="drain")
    await node.leave()
    assert (await summary(world.grid)).problems == ("No node is online.",)
    await world.job()
    assert (await summary(world.grid)).problems == ("There is work, but no node is online.",)
    await world.node("a")
    await world.settle()
    health = await summary(world.grid)
    assert (health.ok, health.nodes_online, health.nodes_working, health.tasks_leased) == (
        True,
        1,
        1,
        1,
    )
