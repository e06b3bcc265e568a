"""The figures are true, bounded, and the grid's are read seldom."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from distribai.orchestrator import traffic
from distribai.orchestrator.metrics import FRESH_S, Metrics
from tests.orchestrator.harness import World

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def page(world: World) -> Page:
    text = (await world.grid.metrics.page(world.grid)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Page, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


async def test_a_job_s_course_shows_in_the_figures(world: World) -> None:
    world.grid.db.observe = world.grid.metrics.transaction
    node = await world.node("one")
    before = await page(world)
    assert value(before, "distribai_grid_jobs", state="running") == 0
    assert value(before, "distribai_streams") == 1

    job_id = await world.job()
    await node.next_training()
    traffic.count(world.grid, job_id, node.id, "delta", 70, 0)
    traffic.count(world.grid, job_id, node.id, "surprise", 0, 5)
    await world.settle()
    assert await world.run_job(job_id) == "completed"
    found = await page(world)
    assert value(found, "distribai_grid_jobs", state="completed") == 1
    assert value(found, "distribai_grid_rounds", state="merged") == 3
    assert value(found, "distribai_grid_tasks", state="accepted", phase="train") == 3
    assert value(found, "distribai_grid_tasks", state="superseded", phase="train") == 0
    assert value(found, "distribai_grid_tasks", state="rejected", phase="train") == 0
    assert value(found, "distribai_grid_nodes", liveness="online", standing="trusted") == 1
    assert value(found, "distribai_grid_tokens_accepted") == 6 * 2 * 8
    assert value(found, "distribai_bytes_total", leg="up", kind="delta") == 70
    assert value(found, "distribai_bytes_total", leg="down", kind="other") == 5
    assert value(found, "distribai_db_transaction_seconds_count", mode="write") > 10
    assert value(found, "distribai_db_wait_seconds_count", mode="read") > 10

    await node.vanish()
    assert value(await page(world), "distribai_streams") == 0


async def test_the_grid_is_read_once_for_all_who_ask_meanwhile(world: World) -> None:
    reads = []
    await page(world)
    world.grid.db.observe = lambda mode, waited, held: reads.append(mode)
    for _ in range(5):
        await page(world)
    assert reads == []
    world.time.now += FRESH_S
    await page(world)
    await page(world)
    assert reads == ["read"]


async def test_no_series_is_about_one_job_or_node(world: World) -> None:
    first = set(await page(world))
    node = await world.node("one")
    for _ in range(3):
        await world.job()
    await node.next_training()
    world.time.now += FRESH_S
    found = set(await page(world))
    assert found == first
    text = (await world.grid.metrics.page(world.grid)).decode()
    assert node.id not in text
    assert "job_" not in text


def test_what_somebody_asks_for_makes_no_series() -> None:
    metrics = Metrics()
    for number in range(50):
        metrics.request(f"METHOD{number}", "", 404, 0.1)
    named = metrics.registry.get_sample_value(
        "distribai_http_requests_total", {"method": "other", "route": "none", "status": "404"}
    )
    assert named == 50


async def test_a_duty_s_looks_are_timed(world: World) -> None:
    world.duties.start()
    while not value(await page(world), "distribai_duty_seconds_count", duty="merge"):
        await world.settle()
    await world.duties.stop()


async def test_an_upload_counts_until_it_is_whole(world: World) -> None:
    from distribai.core.spec import BlobRef

    upload = world.grid.blobs.uploads.begin(BlobRef("ab" * 32, 10))
    assert value(await page(world), "distribai_uploads") == 1
    world.grid.blobs.uploads.drop(upload.id)
    assert value(await page(world), "distribai_uploads") == 0
