"""The channel between daemon and training child."""

from __future__ import annotations

import pytest

from distribai.core import child
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec
from distribai.core.tasks import (
    Assignment,
    DatasetRef,
    Outcome,
    Progress,
    UpdateRef,
    WeightsRef,
)

REF = BlobRef("a" * 64, 12)
SPEC = JobSpec("j", ModelSpec("decoder_transformer", {"dim": 8}), DataSpec(), steps=10)
BASE = WeightsRef(2, "h", REF, 1, (UpdateRef(2, REF, "h"),))
ASSIGNMENT = Assignment(
    "job_x",
    "task_x",
    3,
    2,
    "train",
    SPEC,
    BASE,
    DatasetRef(REF),
    samples=(SampleRange(0, 80),),
    steps=10,
    env={"RANK": "0"},
    params={"batches": 4},
)

MESSAGES = [
    child.Run(ASSIGNMENT, "/out", "cpu", 1),
    child.Run(ASSIGNMENT, "/out", "cpu", 1, child.Checkpoints(15.0, 0.03, 1 << 30)),
    child.Have({"a" * 64: "/p"}),
    child.Gate(0.5, True, False),
    child.Finish("task_x", 2.5),
    child.Cancel("task_x", "why"),
    child.Ready("2.13", ("cpu",)),
    child.Need((REF,)),
    child.ProgressLine(Progress("task_x", 3, 1, 10, 2.5, 100.0)),
    child.Checkpointed(40, resumed=True),
    child.LogLine("info", "hello", {"k": "v"}),
    child.Done(
        Outcome("task_x", 3, "done", REF, (SampleRange(0, 80),), 10, 640, "h", {"loss": 1.0}), "/d"
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.type)
def test_every_message_reads_back_equal_from_one_line(message: child.Message) -> None:
    line = child.encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert child.decode(line) == message


@pytest.mark.parametrize(
    "line", [b"", b"hello", b"[]", b'{"type":"spam"}', b'{"type":"gate","x":1}']
)
def test_an_unreadable_line_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        child.decode(line)
