"""A training child without torch. ``params["do"]`` of the task says how it behaves."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

from distribai.core import child as wire
from distribai.core.spec import BlobRef
from distribai.core.tasks import Assignment, Outcome, Progress


def say(message: wire.FromChild) -> None:
    sys.stdout.buffer.write(wire.encode(message))
    sys.stdout.buffer.flush()


def hear() -> wire.ToChild:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    return wire.decode(line)  # type: ignore[return-value]


def train(task: Assignment, run: wire.Run) -> wire.Done:
    base = b"weights"
    if task.base.snapshot is not None:
        say(wire.Need((task.base.snapshot,)))
        while not isinstance(message := hear(), wire.Have):
            if isinstance(message, wire.Cancel):
                return wire.Done(
                    Outcome(task.task_id, task.attempt, "failed", error_code="task.failed",
                            reason="dropped")
                )  # fmt: skip
        base = Path(message.paths[task.base.snapshot.sha256]).read_bytes()
    for step in range(1, task.steps + 1):
        say(wire.ProgressLine(Progress(task.task_id, task.attempt, step, task.steps, 2.0, 100.0)))
    say(wire.LogLine("info", "trained", {"pid": str(os.getpid())}))
    delta = b"delta of " + base
    residual = None
    if run.owed is not None:  # what is kept tells whose deltas it is of, what is sent what it owed
        kept = Path(run.owed.kept).read_bytes() if run.owed.kept else b""
        lost = b"".join(Path(p).read_bytes() for p in run.owed.lost)
        delta = b"(" + task.task_id.encode() + b" owes " + kept + lost + b")"
        rest = kept + task.task_id.encode() + b";"
        (Path(run.out_dir) / wire.RESIDUAL).write_bytes(rest)
        residual = BlobRef(hashlib.sha256(rest).hexdigest(), len(rest))
    path = Path(run.out_dir) / "delta.safetensors"
    path.write_bytes(delta)
    outcome = Outcome(
        task.task_id,
        task.attempt,
        "done",
        BlobRef(hashlib.sha256(delta).hexdigest(), len(delta)),
        task.samples,
        task.steps,
        512,
        task.base.weights_hash,
        {"loss_last": 2.0},
        text=f"pid={os.getpid()} device={run.device} threads={run.threads}",
    )
    return wire.Done(outcome, str(path), residual)


def wait(task: Assignment) -> wire.Done:
    """Until the task is dropped or finished early; tells the gates that it saw."""
    say(wire.LogLine("info", "waiting", {"pid": str(os.getpid())}))
    seen = []
    while True:
        message = hear()
        if isinstance(message, wire.Gate):
            seen.append(f"{message.share} {message.pause} {message.finish}")
            if message.finish:
                text = "; ".join(seen)
                return wire.Done(Outcome(task.task_id, task.attempt, "done", steps=1, text=text))
        if isinstance(message, wire.Finish):
            text = f"within {message.within_s:.3f}"
            return wire.Done(Outcome(task.task_id, task.attempt, "done", steps=1, text=text))
        if isinstance(message, wire.Cancel):
            return wire.Done(
                Outcome(task.task_id, task.attempt, "failed", error_code="task.failed",
                        reason=message.reason)
            )  # fmt: skip


def stumble(task: Assignment, run: wire.Run, lives: int) -> None:
    """Get one step further per life, and no further in the last one of ``lives`` but to the end;
    with one life: die again and again at the same step."""
    note = Path(run.out_dir) / "step"
    step = int(note.read_text()) if note.exists() else 0
    if step:
        say(wire.Checkpointed(step, resumed=True))
    if lives > 1 and step == lives - 1:
        say(train(task, run))
        return
    note.write_text(str(1 if lives == 1 else step + 1))
    if step == 0 or lives > 1:
        say(wire.Checkpointed(step + 1))
    os.kill(os.getpid(), signal.SIGKILL)


def do(run: wire.Run) -> None:
    task = run.assignment
    how = task.params.get("do", "train")
    if how == "train":
        say(train(task, run))
    elif how == "wait":
        say(wait(task))
    elif how.startswith("stumble"):
        stumble(task, run, int(how.removeprefix("stumble")))
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        print("boom: first line\nboom: last line", file=sys.stderr)
        sys.exit(3)
    elif how == "abort":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "alloc":
        print("terminate called after throwing: std::bad_alloc", file=sys.stderr)
        sys.exit(134)
    elif how == "mute":
        os.close(1)
        while True:
            signal.pause()
    elif how == "hang":
        say(wire.LogLine("info", "waiting"))
        while True:
            hear()
    elif how == "half":
        sys.stdout.write('{"type": "do')
        sys.stdout.flush()
        sys.exit(0)
    elif how.startswith("keep"):
        path = Path(run.out_dir) / "kept.safetensors"
        path.write_bytes(b"torn" if how == "keep torn" else b"whole weights")
        say(wire.Kept(str(path), BlobRef(hashlib.sha256(b"whole weights").hexdigest(), 13)))
        text = f"here={len(run.here)} room={run.room}"
        say(wire.Done(Outcome(task.task_id, task.attempt, "done", text=text)))
    elif how == "begun":
        say(wire.Need(tuple(ref.blob for ref in run.begun)))
        message = hear()
        while not isinstance(message, wire.Have):
            message = hear()
        text = f"begun={len(run.begun)} here={sum(run.here.values())} gone={len(message.gone)}"
        say(wire.Done(Outcome(task.task_id, task.attempt, "done", text=text)))
    elif how == "no delta":
        ref = BlobRef("0" * 64, 1)
        say(wire.Done(Outcome(task.task_id, task.attempt, "done", ref), "/nonexistent/delta"))
    elif how == "other":
        say(wire.Done(Outcome("task_other", 1, "done")))
    elif how == "twice":
        say(wire.Need((BlobRef("0" * 64, 1),)))
        say(wire.Need((BlobRef("1" * 64, 1),)))
    elif how == "large":
        say(wire.Done(Outcome(task.task_id, task.attempt, "done", text="x" * 3_000_000)))
    else:  # the line itself
        sys.stdout.write(how + "\n")
        sys.stdout.flush()
        hear()


def main() -> None:
    start = sys.argv[1] if len(sys.argv) > 1 else ""
    if start == "no torch":
        sys.exit("ModuleNotFoundError: No module named 'torch'")
    if start == "silent":
        hear()
    if start == "eager":
        say(wire.LogLine("info", "hello"))
    say(wire.Ready("2.13", ("cpu",)))
    while True:
        message = hear()
        if isinstance(message, wire.Run):
            do(message)
        if isinstance(message, wire.Measure):
            say(wire.Measured(50.0, 10.0, "" if start != "unmeasurable" else "it is too warm"))


main()
