"""The package executor keeps error feedback: when it counts, and when it never happened."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distribai.core.child import Owed
from distribai.core.spec import RoundSpec
from distribai.core.tasks import Assignment, OwnWork
from distribai.node.feedback import FeedbackStore
from distribai.node.keeping import Keeper
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import CAP_S, SPEC, assignment, eventually, ref_of
from tests.node.test_daemon import Grid, grid
from tests.node.test_feedback import MODEL
from tests.node.test_package import PLACE, Bench, bench

__all__ = ["bench", "grid"]


def task(name: str, *own: str, how: str = "train", **changes: Any) -> Assignment:
    """A task of an int4 job; ``own`` earlier ones are merged."""
    spec = replace(SPEC, model=MODEL, rounds=RoundSpec(codec_up="int4"))
    fates = tuple(OwnWork(other, 1, True) for other in own)
    return assignment(name, spec=spec, params={"do": how}, own=fates, **changes)


def owed(bench: Bench, *own: str) -> tuple[bytes, list[bytes]]:
    """What the next task would be told."""
    found = bench.feedback.prepare(task("next", *own), 0)
    assert isinstance(found, Owed)
    kept = Path(found.kept).read_bytes() if found.kept else b""
    return kept, [Path(p).read_bytes() for p in found.lost]


async def test_what_a_delta_did_not_send_goes_with_the_next_one(bench: Bench) -> None:
    executor = bench.executor()
    await executor.do(task("a"))
    outcome = await executor.do(task("b", "a"))
    assert outcome.delta == ref_of(b"(b owes a;)")
    assert bench.server.blobs[outcome.delta.sha256] == b"(b owes a;)"
    assert owed(bench, "a", "b") == (b"a;b;", [])


async def test_a_delta_that_came_to_nothing_is_added_back_once(bench: Bench) -> None:
    executor = bench.executor()
    await executor.do(task("a"))
    assert (await executor.do(task("b"))).delta == ref_of(b"(b owes a;(a owes ))")
    assert (await executor.do(task("c", "b"))).delta == ref_of(b"(c owes a;b;)")


async def test_an_attempt_that_fails_leaves_what_is_owed_as_it_was(bench: Bench) -> None:
    executor = bench.executor()
    await executor.do(task("a"))
    before = owed(bench, "a")
    assert (await executor.do(task("b", "a", how="exit"))).status == "failed"
    assert owed(bench, "a") == before
    bench.server.statuses = [403]
    assert (await executor.do(task("c", "a"))).error_code == "auth.forbidden"
    assert owed(bench, "a") == before
    bench.feedback = FeedbackStore(bench.root, 10**9)
    assert owed(bench, "a") == before


async def stopped_while_uploading(bench: Bench, work: Assignment) -> Keeper:
    """The daemon is gone while a delta is on its way."""
    keeper = bench.keeper(work)
    on_the_way, let_go = asyncio.Event(), asyncio.Event()

    async def upload(*arguments: object, **named: object) -> None:
        on_the_way.set()
        await let_go.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.blobs, "upload", upload)
        first = asyncio.ensure_future(bench.executor().run(work, PLACE, keeper))
        await asyncio.wait_for(on_the_way.wait(), CAP_S)
        first.cancel()
        await asyncio.wait({first})
    bench.feedback = FeedbackStore(bench.root, 10**9)
    return keeper


async def test_an_upload_that_was_cut_off_goes_on_in_the_next_daemon(bench: Bench) -> None:
    await bench.executor().do(task("a"))
    work = task("b", "a")
    keeper = await stopped_while_uploading(bench, work)
    said = len(bench.lines)
    outcome = await bench.executor().run(work, PLACE, keeper)
    assert (outcome.status, outcome.delta) == ("done", ref_of(b"(b owes a;)"))
    assert len(bench.lines) == said, "nothing was trained again"
    assert owed(bench, "a", "b") == (b"a;b;", [])


@pytest.mark.parametrize("torn", ["delta", "residual"])
async def test_what_is_torn_is_trained_again_and_owes_the_same(bench: Bench, torn: str) -> None:
    await bench.executor().do(task("a"))
    work = task("b", "a")
    keeper = await stopped_while_uploading(bench, work)
    assert keeper.record.outcome is not None
    assert keeper.record.residual is not None
    blob = keeper.record.outcome.delta if torn == "delta" else keeper.record.residual
    assert blob is not None
    (path,) = (bench.root / "feedback").rglob(f"{blob.sha256}*")
    path.write_bytes(b"torn")
    outcome = await bench.executor().run(work, PLACE, keeper)
    assert outcome.delta == ref_of(b"(b owes a;)")
    assert owed(bench, "a", "b") == (b"a;b;", [])


async def test_without_room_a_delta_goes_without_error_feedback(bench: Bench) -> None:
    bench.feedback = FeedbackStore(bench.root, 1)
    executor = bench.executor()
    assert (await executor.do(task("a"))).delta == ref_of(b"delta of weights")
    assert not (bench.root / "feedback").exists()


async def test_codecs_that_need_none_keep_nothing(bench: Bench) -> None:
    plain = replace(task("a"), spec=replace(SPEC, model=MODEL, rounds=RoundSpec(codec_up="int8")))
    await bench.executor().do(plain)
    assert not (bench.root / "feedback").exists()


async def test_an_ended_job_is_forgotten(bench: Bench) -> None:
    executor = bench.executor()
    await executor.do(task("a"))
    assert bench.feedback.jobs() == ["job_a"]
    await executor.forget(["job_a"])
    assert bench.feedback.jobs() == []
    assert not any((bench.root / "feedback").iterdir())


async def test_a_daemon_names_the_jobs_that_it_keeps_something_of_and_forgets_ended_ones(
    grid: Grid,
) -> None:
    folder = grid.root / "state" / "feedback"
    await grid.up()
    for name, job_id in (("task_a", "job_a"), ("task_b", "job_b"), ("task_c", "job_c")):
        grid.peer.assign(task(name, job_id=job_id))
        grid.peer.acknowledge(await grid.peer.hear("task_result"))
    assert len(list(folder.iterdir())) == 3
    grid.peer.say(round_complete=pb.DiLoCoRoundComplete(job_id="job_a", job_done=True))
    await eventually(lambda: len(list(folder.iterdir())) == 2)
    await grid.stop()
    grid.start()
    register = await grid.join(ended=["job_b"])
    assert list(register.jobs) == ["job_b", "job_c"]
    await eventually(lambda: len(list(folder.iterdir())) == 1)
    grid.peer.assign(task("task_d", "task_c", job_id="job_c"))
    result = await grid.peer.hear("task_result")
    assert grid.server.blobs[result.delta.sha256] == b"(task_d owes task_c;)"
