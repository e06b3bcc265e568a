"""Tasks in hand on disk: whole after any crash, in order, and never fatal."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from distribai import points
from distribai.core.tasks import Outcome
from distribai.node.keeping import HandFiles
from distribai.wire import convert
from distribai.wire.v1 import distribai_pb2 as pb
from tests.node.helpers import assignment, ref_of

OUTCOME = Outcome("task_a", 1, "done", ref_of(b"delta"), steps=2, metrics={"loss_last": 2.5})


def message(task_id: str = "task_a", attempt: int = 1) -> pb.TaskAssign:
    return convert.assignment_to_wire(assignment(task_id, attempt), 3)


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[HandFiles]:
    made = HandFiles(tmp_path)
    yield made
    await made.close()


async def test_what_is_kept_is_found_by_the_next_daemon(files: HandFiles, tmp_path: Path) -> None:
    keeper = files.new(message())
    await keeper.keep("taken")
    await keeper.keep("trained", outcome=OUTCOME, delta="d")
    await keeper.note("uploading", upload="up_1")
    keeper.folder.mkdir(parents=True)
    (keeper.folder / "d").write_bytes(b"delta")
    (kept,) = await HandFiles(tmp_path).load()
    assert (kept.assignment, kept.device, kept.result) == (assignment(), 3, None)
    assert kept.keeper.record == keeper.record
    assert (kept.keeper.folder / "d").read_bytes() == b"delta"
    kept.keeper.forget()
    assert await kept.keeper._files.load() == []
    assert not keeper.folder.exists()


async def test_only_the_newest_attempt_is_kept_and_the_rest_is_wiped(
    files: HandFiles, tmp_path: Path
) -> None:
    for attempt in (1, 3, 2):
        keeper = files.new(message(attempt=attempt))
        await keeper.keep("taken")
        keeper.folder.mkdir(parents=True)
    other = files.new(message("task_b"))
    await other.keep("taken")
    (tmp_path / "work" / "stray").mkdir()
    (tmp_path / "work" / "file").write_text("x")
    (tmp_path / "hands" / "cut.hand.new").write_text("x")
    found = {(k.assignment.task_id, k.assignment.attempt) for k in await files.load()}
    assert found == {("task_a", 3), ("task_b", 1)}
    assert len(list((tmp_path / "work").iterdir())) == 1
    assert len(list((tmp_path / "hands").iterdir())) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
        lambda data: b"\xff" * 500,
    ],
)
async def test_a_record_that_is_torn_or_changed_is_named_and_dropped(
    files: HandFiles, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    await files.new(message()).keep("taken")
    await files.new(message("task_b")).keep("taken")
    (bad,) = (tmp_path / "hands").glob("task_a*")
    bad.write_bytes(spoil(bad.read_bytes()))
    with capture_logs() as logs:
        (kept,) = await files.load()
    assert kept.assignment.task_id == "task_b"
    assert [line["file"] for line in logs] == [str(bad)]
    assert not bad.exists()


async def test_a_crash_at_any_point_leaves_the_older_record_or_the_newer_one(
    files: HandFiles, tmp_path: Path
) -> None:
    keeper = files.new(message())
    seen: list[str] = []
    points.install(seen.append)
    try:
        await keeper.keep("taken")
        assert seen[0] == "node.hand.taken.written"
        for name in [n.replace("taken", "trained") for n in seen]:

            def die(here: str, name: str = name) -> None:
                if here == name:
                    raise KeyboardInterrupt

            points.install(die)
            with pytest.raises(KeyboardInterrupt):
                files.write(keeper.folder.name, keeper.record, "trained")
            points.install(None)
            (kept,) = await HandFiles(tmp_path).load()
            assert kept.keeper.record == keeper.record
    finally:
        points.install(None)


async def test_what_is_asked_for_happens_in_order(files: HandFiles) -> None:
    for _ in range(20):
        keeper = files.new(message())
        await keeper.keep("taken")
        keeper.forget()
        again = files.new(message())
        await again.keep("taken")
        assert len(await files.load()) == 1
        again.forget()
        assert await files.load() == []


async def test_a_full_disk_keeps_the_older_record(files: HandFiles, tmp_path: Path) -> None:
    keeper = files.new(message())
    await keeper.keep("taken")
    (record,) = (tmp_path / "hands").iterdir()
    blocked = record.with_name(record.name + ".new")
    blocked.mkdir()  # no new record can be written beside it
    with pytest.raises(OSError, match="Is a directory"):
        await keeper.keep("trained", outcome=OUTCOME, delta="d")
    with capture_logs() as logs:
        signed = pb.TaskResult(task_id="task_a", attempt=1).SerializeToString()
        await keeper.note("owed", result=base64.b64encode(signed).decode())
    assert [line["what"] for line in logs] == ["owed"]
    (kept,) = await files.load()
    assert kept.keeper.record.outcome is None
    assert not blocked.exists()
    await keeper.keep("owed")
    (kept,) = await files.load()
    assert kept.keeper.record == keeper.record


async def test_a_task_id_leads_nowhere_else(files: HandFiles, tmp_path: Path) -> None:
    keeper = files.new(message("../../etc/passwd"))
    await keeper.keep("taken")
    assert keeper.folder.parent == tmp_path / "work"
    assert len(list((tmp_path / "hands").iterdir())) == 1
