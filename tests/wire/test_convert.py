from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.devices import Device, Machine, Speed, TaskInHand
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec, ResourceSpec
from distribai.core.tasks import (
    Assignment,
    DatasetRef,
    Outcome,
    Progress,
    UpdateRef,
    WeightsRef,
)
from distribai.errors import Conflict, NotAllowed, ProtocolMismatch, Unavailable
from distribai.wire import checks, convert
from distribai.wire.endings import end_of, error_of
from distribai.wire.machines import machine_from_wire, machine_to_wire
from distribai.wire.v1 import distribai_pb2 as pb

A, B, C = (BlobRef(x * 64, n) for n, x in enumerate("abc", start=1))
SPEC = JobSpec("demo", ModelSpec("decoder_transformer", {"dim": 8, "tied": True}), DataSpec(), 100)
WEIGHTS = WeightsRef(3, "hash3", A, 1, (UpdateRef(2, B, "hash2"), UpdateRef(3, C, "hash3")))
ASSIGNMENT = Assignment(
    job_id="job_a",
    task_id="task_a",
    attempt=1,
    round=3,
    phase="train",
    spec=SPEC,
    base=WEIGHTS,
    data=DatasetRef(B),
    samples=(SampleRange(0, 8), SampleRange(16, 24)),
    steps=2,
    inner_step_offset=150,
    deadline_s=60.5,
    env={"RANK": "0"},
    params={"batches": 3, "prompt": "déf"},
)
OUTCOME = Outcome(
    "task_a", 1, "done", A, (SampleRange(0, 8),), 2, 512, "h", {"loss_last": 1.5}, "text"
)


def over_the_wire(message: pb.TaskAssign) -> pb.TaskAssign:
    return pb.TaskAssign.FromString(message.SerializeToString())


def test_an_assignment_survives_the_wire() -> None:
    message = over_the_wire(convert.assignment_to_wire(ASSIGNMENT, 2))
    assert convert.assignment_from_wire(message) == (ASSIGNMENT, 2)


def test_a_node_of_before_reads_a_spec_that_asks_for_nothing_new() -> None:
    text = convert.assignment_to_wire(ASSIGNMENT, 2).spec_json
    known = {"memory_mb", "device", "precision", "compile"}
    assert set(json.loads(text)["resources"]) == known
    asking = replace(SPEC, resources=ResourceSpec(disk_mb=5, isolation="L2"))
    message = over_the_wire(convert.assignment_to_wire(replace(ASSIGNMENT, spec=asking), 2))
    assert set(json.loads(message.spec_json)["resources"]) == known | {"disk_mb", "isolation"}
    assert convert.assignment_from_wire(message)[0].spec == asking


MACHINE = Machine(64_000, 900_000, 500.0, 80.0, "L2", "f", (Speed(0, 800.0, 300.0),), 12.0, 9, 4)


def test_a_machine_survives_the_wire_and_nonsense_counts_as_unknown() -> None:
    assert machine_from_wire(machine_to_wire(MACHINE)) == MACHINE
    assert machine_to_wire(None) is None
    odd = pb.Machine(disk_mbps=float("nan"), link_mbps=-1.0, isolation="L9", fingerprint="x" * 999)
    odd.speeds.add(device=1, gflops=float("inf"))
    assert machine_from_wire(odd) == Machine(fingerprint="x" * 100, speeds=(Speed(1, 0.0, 0.0),))
    with pytest.raises(ProtocolMismatch):
        machine_from_wire(pb.Machine(memory_mb=2**64 - 1))
    with pytest.raises(ProtocolMismatch):
        machine_from_wire(pb.Machine(speeds=[pb.DeviceSpeed()] * 2000))


def test_an_assignment_without_data_or_snapshot_survives_the_wire() -> None:
    bare = Assignment(
        "job_a", "task_a", 1, 0, "generate", SPEC, WeightsRef(0, "hash0"), None, params={"seed": 1}
    )
    message = over_the_wire(convert.assignment_to_wire(bare, 0))
    assert convert.assignment_from_wire(message) == (bare, 0)


def spoil(**changes: object) -> Callable[[pb.TaskAssign], None]:
    def apply(message: pb.TaskAssign) -> None:
        for name, value in changes.items():
            setattr(message, name, value)

    return apply


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (spoil(task_id=""), "task_id"),
        (spoil(attempt=0), "attempt"),
        (spoil(executor=""), "executor"),
        (spoil(phase="dream"), "phase"),
        (spoil(deadline_s=float("nan")), "deadline_s"),
        (spoil(deadline_s=-1.0), "deadline_s"),
        (spoil(spec_json="{"), "spec_json"),
        (spoil(spec_json="{}"), "name: missing"),
        (spoil(spec_json="NaN"), "NaN"),
        (spoil(params_json="[]"), "params_json"),
        (lambda m: m.ClearField("base"), "base is missing"),
        (lambda m: setattr(m.base, "weights_hash", ""), "weights_hash"),
        (lambda m: setattr(m.base, "version", 9), "one by one"),
        (lambda m: m.base.updates.pop(0) and m.base.updates.add(), "updates"),
        (lambda m: setattr(m.base.snapshot, "sha256", "../../etc/passwd"), "snapshot.sha256"),
        (lambda m: setattr(m.dataset, "sha256", "A" * 64), "dataset.sha256"),
        (lambda m: m.samples.add(start=5, stop=5), "samples"),
    ],
)
def test_a_malformed_assignment_is_refused(
    change: Callable[[pb.TaskAssign], None], what: str
) -> None:
    message = convert.assignment_to_wire(ASSIGNMENT, 0)
    change(message)
    with pytest.raises(ProtocolMismatch) as caught:
        convert.assignment_from_wire(message)
    assert caught.value.code == "protocol.malformed"
    assert what in caught.value.message


@settings(max_examples=60)
@given(
    st.builds(
        Outcome,
        task_id=st.from_regex(r"[a-z0-9_]{1,64}", fullmatch=True),
        attempt=st.integers(1, checks.MAX_INT),
        status=st.sampled_from(["done", "failed"]),
        delta=st.none() | st.just(A),
        samples=st.lists(st.builds(lambda s, n: SampleRange(s, s + n), st.integers(0, 2**60),
                                   st.integers(1, 2**20)), max_size=4).map(tuple),
        steps=st.integers(0, checks.MAX_INT),
        tokens=st.integers(0, checks.MAX_BIG),
        metrics=st.dictionaries(st.text(max_size=4),
                                st.floats(allow_nan=False, allow_infinity=False), max_size=3),
        text=st.text(max_size=10),
    )
)  # fmt: skip
def test_any_outcome_survives_the_wire(outcome: Outcome) -> None:
    message = convert.outcome_to_wire(outcome, b"s" * 64)
    read = pb.TaskResult.FromString(message.SerializeToString())
    assert convert.outcome_from_wire(read) == (outcome, b"s" * 64)


@pytest.mark.parametrize(
    "change",
    [
        {"task_id": ""},
        {"attempt": 0},
        {"status": "maybe"},
        {"metrics": {"loss": float("inf")}},
        {"delta": pb.BlobRef(sha256="x", size=1)},
    ],
)
def test_a_malformed_result_is_refused(change: dict[str, object]) -> None:
    message = convert.outcome_to_wire(OUTCOME, b"")
    for name in change:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(pb.TaskResult(**change))  # type: ignore[arg-type]
    with pytest.raises(ProtocolMismatch) as caught:
        convert.outcome_from_wire(message)
    assert caught.value.code == "protocol.malformed"


def test_progress_survives_the_wire() -> None:
    progress = Progress("task_a", 1, 5, 50, 2.25, 1000.0)
    assert convert.progress_from_wire(convert.progress_to_wire(progress)) == progress
    with pytest.raises(ProtocolMismatch):
        convert.progress_from_wire(pb.TaskProgress(task_id="task_a"))


def test_devices_and_tasks_in_hand_survive_the_wire() -> None:
    devices = (Device(0, "cpu", "EPYC", 4096, 2), Device(1, "cuda", "H200", 141_000, 2))
    assert convert.devices_from_wire([convert.device_to_wire(d) for d in devices]) == devices
    tasks = (TaskInHand("task_a", 1, 0), TaskInHand("task_b", 3, 1))
    assert convert.in_hand_from_wire(convert.in_hand_to_wire(tasks)) == tasks


@pytest.mark.parametrize(
    "devices",
    [[pb.Device(type="tpu")], [pb.Device(type="cpu"), pb.Device(type="cpu")]],
)
def test_malformed_devices_are_refused(devices: list[pb.Device]) -> None:
    with pytest.raises(ProtocolMismatch):
        convert.devices_from_wire(devices)


def test_a_task_in_hand_without_attempt_is_refused() -> None:
    with pytest.raises(ProtocolMismatch):
        convert.in_hand_from_wire([pb.TaskInHand(task_id="task_a")])


def test_an_error_ends_a_session_and_is_the_same_error_on_the_other_side() -> None:
    error = NotAllowed("node.invite", "The invite is used up.", "Ask for another.")
    end = end_of(error, retry=False)
    read = error_of(end)
    assert (type(read), read.code, read.message, read.hint) == (
        NotAllowed, "node.invite", "The invite is used up.", "Ask for another.",
    )  # fmt: skip
    assert not end.retry
    assert isinstance(error_of(pb.SessionEnd(code="node.fenced", message="m")), Conflict)


def test_an_error_of_a_newer_program_is_still_readable() -> None:
    read = error_of(pb.SessionEnd(code="moon.phase", message="Full moon.", hint="Wait."))
    assert isinstance(read, Unavailable)
    assert "Full moon." in read.message
    assert "moon.phase" in read.message
