"""A task that is interrupted and resumed ends in the same bytes as one that was left alone."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distribai import points
from distribai.core.child import Checkpointed, Checkpoints, FromChild, LogLine, Run
from distribai.core.plain import canonical_json
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef, OptimizerSpec
from distribai.core.tasks import Assignment, Outcome
from distribai.merge.tensorfile import TensorWriter
from distribai.training import checkpoint
from distribai.training.checkpoint import INDEX, Budget
from distribai.training.desk import Desk
from distribai.training.loop import no_report

from .daemon import B, Grid, make_spec

ALWAYS = Checkpoints(every_s=1e-9, share=1e9, max_bytes=1 << 30)
STEPS = 8


class Killed(BaseException):
    """Stands for the end of the process."""


class Script:
    """A gate that ends the process after some steps."""

    exact = False

    def __init__(self, die_after: int = 0) -> None:
        self.die_after, self.steps = die_after, 0

    def __call__(self, step_seconds: float, left: int = 0) -> bool:
        if left or step_seconds:
            self.steps += 1
        if self.steps == self.die_after:
            raise Killed
        return True


class Machine:
    """Desks of one job, one after the other, over the same directory."""

    def __init__(self, root: Path, **spec: object) -> None:
        moments = str(spec.pop("moments", "fresh"))
        folder = root / "job"
        folder.mkdir()
        made = replace(make_spec(moments), **spec)  # type: ignore[arg-type]
        self.grid = Grid(folder, replace(made, rounds=replace(made.rounds, inner_steps=STEPS)))
        self.out = root / "hand"
        self.out.mkdir()
        self.told: list[FromChild] = []
        self.micro_batch = 0

    def fetch(self, blobs: Iterable[BlobRef]) -> Mapping[str, Path]:
        return {b.sha256: self.grid.blobs[b.sha256] for b in blobs}

    def task(self, **changes: object) -> Assignment:
        made = self.grid.task("a", steps=STEPS, samples=(SampleRange(0, STEPS * B),))
        return replace(made, **changes)  # type: ignore[arg-type]

    def train(
        self,
        gate: Script | None = None,
        task: Assignment | None = None,
        limits: Checkpoints = ALWAYS,
    ) -> Outcome:
        """The whole task in a new process."""
        task = task or self.task()
        torch.set_num_threads(1)
        desk = Desk(task.job_id, task.spec, "cpu", itertools.count().__next__)
        desk.loop.micro_batch = self.micro_batch
        gate = gate or Script()
        run = Run(task, str(self.out), "cpu", 1, limits)
        done = desk.train(run, self.fetch, gate, no_report, self.told.append)
        self.steps_trained = gate.steps
        written = hashlib.sha256(Path(done.delta_path).read_bytes()).hexdigest()
        assert done.outcome.delta is not None
        assert done.outcome.delta.sha256 == written
        return done.outcome

    def interrupted(self, after: int, **how: object) -> None:
        with pytest.raises(Killed):
            self.train(Script(after), **how)  # type: ignore[arg-type]

    def said(self) -> list[str]:
        return [str(m.fields.get("why")) for m in self.told if isinstance(m, LogLine)]


def same(a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes agree in all but the time they took."""
    timeless = [replace(o, metrics={**o.metrics, "seconds": 0.0}) for o in (a, b)]
    return timeless[0] == timeless[1]


@pytest.mark.parametrize("moments", ["fresh", "keep"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_a_resumed_task_gives_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path, name: str, moments: str, micro_batch: int
) -> None:
    machine = Machine(tmp_path, moments=moments, optimizer=OptimizerSpec(name=name, lr=0.01))  # type: ignore[arg-type]
    machine.micro_batch = micro_batch
    task = machine.task(inner_step_offset=4)  # a newcomer rises again
    whole = machine.train(task=task, limits=Checkpoints())
    machine.interrupted(3, task=task)
    machine.micro_batch = 0  # the new process has to learn it from the checkpoint
    machine.interrupted(3, task=task)  # this one got from step 2 to step 4
    resumed = machine.train(task=task)
    assert machine.steps_trained == STEPS - 4
    assert same(whole, resumed)
    steps = [(m.steps, m.resumed) for m in machine.told if isinstance(m, Checkpointed)]
    assert [s for s, r in steps if r] == [2, 4]
    assert machine.said() == []


def test_a_task_may_end_at_any_point_of_a_checkpoint(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    whole = machine.train(limits=Checkpoints())
    seen: list[str] = []
    points.install(seen.append)
    try:
        machine.interrupted(3)
        names = list(dict.fromkeys(seen))
        assert len(names) >= 6
        for name in names:

            def die(here: str, name: str = name) -> None:
                if here == name:
                    raise Killed

            points.install(die)
            with pytest.raises(Killed):
                machine.train()
            points.install(None)
            assert same(machine.train(limits=Checkpoints()), whole)
    finally:
        points.install(None)
    assert machine.said() == []


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _newest(folder: Path) -> Path:
    (found,) = folder.glob("checkpoint.*.safetensors")
    return found


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda out: _flip(_newest(out), -5), "its hash does not fit"),
        (lambda out: _flip(out / INDEX, 200), "its hash does not fit"),
        (lambda out: (out / INDEX).write_bytes((out / INDEX).read_bytes()[:-9]), "torn"),
        (lambda out: (out / INDEX).write_bytes(b""), "torn"),
        (lambda out: _newest(out).unlink(), "No such file"),
        (lambda out: _newest(out).write_bytes(_newest(out).read_bytes()[:500]), "torn"),
        (lambda out: _renamed(out), "Missing"),
    ],
)
def test_a_torn_or_changed_checkpoint_is_not_used_and_the_log_says_so(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    machine = Machine(tmp_path)
    whole = machine.train(limits=Checkpoints())
    machine.interrupted(5)
    spoil(machine.out)
    again = machine.train(limits=Checkpoints())
    assert (len(machine.said()), machine.steps_trained) == (1, STEPS)
    assert why.lower() in machine.said()[0].lower()
    assert same(whole, again)


def _renamed(out: Path) -> None:
    """An index that is whole and says something that this version does not know."""
    plain = json.loads((out / INDEX).read_bytes().partition(b"\n")[2])
    del plain["mark"]["tokens"]
    text = canonical_json(plain).encode()
    (out / INDEX).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


@pytest.mark.parametrize(
    "change",
    [{"attempt": 2}, {"job_id": "job_b"}, {"task_id": "task_b"}],
)
def test_a_checkpoint_of_another_task_is_not_used(
    tmp_path: Path, change: dict[str, object]
) -> None:
    machine = Machine(tmp_path)
    machine.interrupted(5)
    machine.train(task=machine.task(**change), limits=Checkpoints())
    assert machine.steps_trained == STEPS
    assert "another task" in machine.said()[0]


def test_a_full_disk_costs_the_checkpoint_and_not_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    whole = machine.train(limits=Checkpoints())
    full, real = [True, True, False], TensorWriter.commit

    def commit(writer: TensorWriter) -> object:
        if not full or full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(writer)

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "commit", commit)
        machine.interrupted(5)
    assert [m for m in machine.told if isinstance(m, Checkpointed)] == [Checkpointed(3)]
    assert ["No space left" in why for why in machine.said()] == [True, True]  # before and after
    assert same(machine.train(), whole)


def test_a_checkpoint_that_is_too_large_is_not_written(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.train(limits=replace(ALWAYS, max_bytes=1000))
    assert "at most 1000 are allowed" in machine.said()[0]
    assert list(machine.out.glob("checkpoint*")) == []


def test_a_checkpoint_leaves_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SPARE_BYTES", 1 << 60)
    machine = Machine(tmp_path)
    machine.train()
    assert "free on the disk" in machine.said()[0]
    assert list(machine.out.glob("checkpoint*")) == []


def test_checkpoints_keep_their_distance_and_their_share_of_the_time() -> None:
    now = 0.0
    budget = Budget(lambda: now)
    budget.begin()
    written = []
    while now < 3000.0:
        now += 1.0
        if budget.due(15.0) and budget.affords(0.03, 600_000_000):  # guessed at 3 s
            before, now = now, now + 6.0  # it takes 6 s
            budget.spent(before)
            written.append(before)
    assert written[0] == 100.0  # 3 s are 3 % of it
    assert all(b - a >= 15 for a, b in itertools.pairwise(written))
    assert 6.0 * len(written) <= 0.03 * now
    assert 6.0 * (len(written) + 1) > 0.03 * (now - 15)
    budget.end()
    budget.begin()
    assert not budget.due(15.0)
    now += 15.0
    assert budget.due(15.0)
    assert not budget.due(0.0)
