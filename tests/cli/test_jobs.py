"""Jobs from the command line."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from distribai.api.answers import JobId, PlanAnswer, VersionRecord
from distribai.cli import job, job_watch, submit, watching
from distribai.cli.job_views import versions_table
from distribai.client import Client
from distribai.core.people import Excess
from distribai.core.plain import to_plain
from distribai.core.plan import Plan
from distribai.core.spec import BlobRef
from distribai.orchestrator.context import Grid
from tests.cli.conftest import Run
from tests.http.stand_in import Orchestrator, job_record, log_record, node_record, running, spec


@pytest.fixture
def made(run: Run) -> str:
    job_id: str = run("job", "create", "my-model", "1000").out.strip()
    return job_id


def test_one_line_makes_a_job_and_names_the_next_one(run: Run, rooms: Orchestrator) -> None:
    done = run("job", "create", "my-model", "1000")
    (job,) = rooms.jobs.values()
    assert (done.status, done.out) == (0, f"{job.id}\n")
    assert f"distribai job accept {job.id}" in done.err
    assert job.spec == spec()
    assert (job.spec.model.profile, job.spec.data.source) == ("tiny", "stdlib")


def test_flags_become_the_spec(run: Run, rooms: Orchestrator) -> None:
    flags = (
        "--profile small --batch 2 --seq-len 32 --inner-steps 7 --seed 5 --workers-min 2 "
        "--workers-max 3 --priority P1 --lr 0.01 --accept --json"
    )
    done = run("job", "create", "x", "70", *flags.split())
    job = rooms.jobs[done.json["id"]]
    assert done.json["state"] == "queued"
    assert to_plain(job.spec) == to_plain(
        spec(
            "x",
            steps=70,
            model={"profile": "small"},
            batch=2,
            seq_len=32,
            inner_steps=7,
            seed=5,
            workers_min=2,
            workers_max=3,
            priority="P1",
            optimizer={"lr": 0.01},
        )
    )


async def test_files_are_uploaded_by_hash(
    run: Run, rooms: Orchestrator, grid: Grid, tmp_path: Path
) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(f"the text of {name}\n" * 10)
    run("job", "create", "x", "10", "--data", "one.txt", "two.txt")
    (job,) = rooms.jobs.values()
    assert job.spec.data.source == "blobs"
    assert [await grid.blobs.size(f.sha256) for f in job.spec.data.files] == [200, 200]


def test_json_lines_are_recognized_by_their_name(
    run: Run, rooms: Orchestrator, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 20)
    run("job", "create", "x", "10", "--data", "a.jsonl")
    (job,) = rooms.jobs.values()
    assert job.spec.data.format == "jsonl"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("job create x 0", "spec.steps"),
        ("job create x 10 --profile huge", "spec.model"),
        ("job create x 10 --data missing.txt", "data.missing"),
        ("job create x 10 --data empty.txt", "data.empty"),
        ("job create x 10 --data short.txt", "data.too_short"),
        ("job create x 10 --workers-min 4 --workers-max 2", "spec.workers"),
        ("submit --recipe missing.yaml", "io.file"),
        ("submit --recipe wrong.yaml", "spec.invalid"),
        ("submit --recipe binary.yaml", "io.file"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(
    run: Run, rooms: Orchestrator, tmp_path: Path, words: str, code: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("x" * 127)
    (tmp_path / "wrong.yaml").write_text("name: x\nstepz: 5\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    done = run(*words.split())
    assert (done.status, done.out) == (2, "")
    assert f"code: {code}" in done.err
    assert "try: " in done.err
    assert not rooms.jobs


def test_the_shortest_text_that_can_be_split_is_sent(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 128)
    assert run("job", "create", "x", "10", "--data", "a.txt").status == 0


def test_a_job_of_a_taken_name_is_told_of_the_other(run: Run, made: str) -> None:
    again = run("job", "create", "my-model", "10", "--json")
    assert f"Job {made} is called my-model too and is submitted" in again.err
    assert "called" not in run("job", "create", "another", "10").err


@pytest.mark.parametrize(
    ("what", "before", "after", "told"),
    [
        ("accepted", "submitted", "queued", "x accepted; it is queued now."),
        ("accepted", "running", "running", "x was accepted already; it is running now."),
        ("resumed", "paused", "running", "x resumed; it is running now."),
        ("resumed", "running", "running", "x was resumed already; it is running now."),
        ("cancelled", "running", "cancelled", "x is cancelled now."),
        ("cancelled", "cancelled", "cancelled", "x was cancelled already."),
    ],
)
def test_what_was_so_before_is_said_to_be_so(
    capsys: pytest.CaptureFixture[str], what: str, before: str, after: str, told: str
) -> None:
    client = cast(Client, SimpleNamespace(job=lambda ref: JobId(id="x", state=before)))
    job._change(client, "name", lambda ref: JobId(id=ref, state=after), what, as_json=False)
    assert capsys.readouterr().out == told + "\n"


def test_the_operator_decides(run: Run, made: str) -> None:
    assert "it is queued now" in run("job", "accept", "my-model").out
    assert run("job", "cancel", made, "--why", "enough", "--json").json["state"] == "cancelled"
    refused = run("job", "accept", made)
    assert (refused.status, "code: state.transition" in refused.err) == (5, True)
    other = run("job", "create", "other", "10").out.strip()
    assert run("job", "decline", other, "--why", "too large").status == 0
    assert "too large" in run("job", "show", other).out


def test_pause_and_resume(run: Run, rooms: Orchestrator, made: str) -> None:
    rooms.jobs[made] = running(rooms.jobs[made])
    assert "paused" in run("job", "pause", made).out
    assert "running" in run("job", "resume", made).out


def test_an_unknown_job_has_status_3(run: Run) -> None:
    done = run("job", "show", "nothing")
    assert (done.status, "code: job.unknown" in done.err) == (3, True)


def test_lists_are_tables_for_people_and_json_for_programs(
    run: Run, rooms: Orchestrator, made: str
) -> None:
    rooms.jobs[made] = running(rooms.jobs[made])
    rooms.nodes = [node_record("a")]
    table = run("job", "list").out.splitlines()
    assert table[0].split() == ["ID", "NAME", "STATE", "ROUND", "NODES", "HELD-OUT", "CREATED"]
    assert "my-model" in table[1]
    assert run("job", "list", "--json").json[0]["id"] == made
    assert run("job", "list", "--state", "failed").out == ""
    assert run("job", "list", "--state", "failed", "--json").json == []
    rounds = run("job", "rounds", made).out.splitlines()
    assert rounds[1].split()[:3] == ["1", "1", "merged"], "people count from 1"
    assert run("job", "rounds", made, "--json").json[0]["number"] == 0, "programs from 0"
    assert run("job", "rounds", made, "--json").json[0]["accepted"] == 1
    assert "no tasks" in run("job", "tasks", made).err
    assert run("job", "versions", made, "--json").json == []
    assert "online" in run("nodes", "list").out
    assert run("nodes", "list", "--json").json[0]["devices"][0]["type"] == "cpu"


def test_a_job_is_shown_for_people(run: Run, rooms: Orchestrator, made: str) -> None:
    rooms.jobs[made] = running(rooms.jobs[made])
    shown = run("job", "show", made).out
    for words in ("running", "2 of 20 merged", "5.5000 (version 0) -> 4.5000 (version 1)"):
        assert words in shown
    assert run("job", "show", made, "--json").json["round"]["slots"] == 3


def test_names_of_others_cannot_command_the_terminal(run: Run, rooms: Orchestrator) -> None:
    rooms.jobs["job_e"] = replace(job_record("job_e", spec()), name="evil\x1b[2J")
    assert "\x1b" not in run("job", "list").out
    assert "\\x1b" in run("job", "list").out


def test_logs_are_lines_or_one_document(run: Run, rooms: Orchestrator, made: str) -> None:
    rooms.logs = [log_record(1, "first"), log_record(2, "second\x1b[2J")]
    out = run("job", "logs", made).out.splitlines()
    assert len(out) == 2
    assert "first k=v" in out[0]
    assert "\x1b" not in out[1]
    assert run("job", "logs", made, "--json").json[0]["message"] == "first"
    rooms.jobs[made] = running(rooms.jobs[made])
    run("job", "cancel", made)
    followed = run("job", "logs", made, "--follow", "--json").out.splitlines()
    assert [json.loads(line)["cursor"] for line in followed] == ["1", "2"]


class TestWatch:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch, rooms: Orchestrator) -> None:
        """Every wait lets the job make a step: rounds 2, 3, then the end."""
        self.rooms = rooms
        self.end = "completed"
        self.waits = 0
        monkeypatch.setattr(job_watch, "follow", partial(job_watch.follow, sleep=self.step))

    def step(self, seconds: float) -> None:
        self.waits += 1
        ((job_id, job),) = self.rooms.jobs.items()
        if self.waits < 3:
            self.rooms.jobs[job_id] = running(job, version=1 + self.waits)
        elif self.end == "interrupt":
            raise KeyboardInterrupt
        else:
            ended = running(job, version=20)
            self.rooms.jobs[job_id] = type(job)(
                **{
                    **{f: getattr(ended, f) for f in type(job).__dataclass_fields__},
                    "state": self.end,
                    "round": None,
                }
            )

    def test_it_tells_each_round_and_ends_with_the_job(self, run: Run, made: str) -> None:
        done = run("job", "watch", made)
        assert done.status == 0
        lines = done.out.splitlines()
        assert [line.split("  ")[:2] for line in lines] == [
            ["submitted", "round 0/20"],
            ["running", "round 3/20"],
            ["running", "round 4/20"],
            ["completed", "round 20/20"],
        ]
        assert "loss 3.250  held-out 4.500  12.3k tokens/s" in lines[1]
        assert "1.2 MB up, 3.4 MB down" in lines[1]
        assert "ETA 3m20s" in lines[1]
        assert "export-weights" in done.err

    def test_a_job_that_does_not_complete_has_status_1(self, run: Run, made: str) -> None:
        self.end = "failed"
        done = run("job", "watch", made)
        assert done.status == 1
        assert f"distribai job logs {made}" in done.err

    def test_ctrl_c_leaves_the_job_running_and_says_so(self, run: Run, made: str) -> None:
        self.end = "interrupt"
        done = run("job", "watch", made)
        assert done.status == 130
        assert "The job goes on" in done.err
        assert self.rooms.jobs[made].state == "running"

    def test_ctrl_c_before_a_job_is_accepted_says_that_it_waits(
        self, run: Run, made: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(job_watch, "follow", partial(job_watch.follow, sleep=interrupt))
        done = run("job", "watch", made)
        assert done.status == 130
        assert f"It waits for the operator's word: distribai job accept {made}" in done.err
        assert "goes on" not in done.err

    def test_programs_get_a_document_a_line(self, run: Run, made: str) -> None:
        done = run("job", "watch", made, "--json")
        states = [json.loads(line)["state"] for line in done.out.splitlines()]
        assert states == ["submitted", "running", "running", "completed"]

    def test_a_restart_of_the_orchestrator_is_waited_out(
        self, run: Run, made: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from distribai.client import Client
        from distribai.errors import Unavailable

        original, calls = Client.job, iter([False, True, True])

        def sometimes(client: Client, ref: str) -> object:
            if next(calls, False):
                raise Unavailable("grid.unreachable", "Away.")
            return original(client, ref)

        monkeypatch.setattr(Client, "job", sometimes)
        done = run("job", "watch", made)
        assert done.status == 0
        assert "Away. Trying again ..." in done.err
        assert "The orchestrator is back." in done.err

    def test_submit_follows_the_job(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text("name: from-recipe\nsteps: 1000\n")
        done = run("submit", "--recipe", "job.yaml", "--yes", "--accept")
        assert done.status == 0
        assert "completed" in done.out
        assert "The plan:" in done.err


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from distribai.errors import Unavailable

    now = [0.0]

    def away() -> None:
        raise Unavailable("grid.unreachable", "Away.")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(Unavailable):
        watching.Patience(lambda: now[0], sleep).call(away)
    assert now[0] == pytest.approx(watching.PATIENCE_S, abs=2 * watching.EVERY_S)


def test_a_watched_list_is_shown_on_every_change(
    run: Run, rooms: Orchestrator, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0

    def sleep(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            rooms.jobs[made] = running(rooms.jobs[made])
        elif waits == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watching, "repeat", partial(watching.repeat, sleep=sleep))
    done = run("job", "list", "--watch")
    assert done.status == 130
    assert [word for word in done.out.split() if word in ("submitted", "running")] == [
        "submitted",
        "running",
    ]


class TestSubmit:
    @pytest.fixture(autouse=True)
    def recipe(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "text.txt").write_text("some text" * 20)
        (tmp_path / "sub" / "job.yaml").write_text(
            "name: from-recipe\nsteps: 100\nH: 10\ndata: {files: [text.txt]}\n"
        )

    def test_a_dry_run_shows_spec_and_plan_and_does_nothing(
        self, run: Run, rooms: Orchestrator
    ) -> None:
        done = run("submit", "--recipe", "sub/job.yaml", "--dry-run")
        assert done.status == 0
        assert "inner_steps: 10" in done.out
        assert "rounds" in done.out
        shown = run("submit", "--recipe", "sub/job.yaml", "--dry-run", "--json").json
        assert shown["plan"]["rounds"] == 10
        assert shown["spec"]["data"]["source"] == "blobs"
        assert not rooms.jobs

    def test_a_plan_says_what_the_grid_would_refuse_for_now(
        self, run: Run, rooms: Orchestrator
    ) -> None:
        hint = "Wait until one ends."
        rooms.excess = Excess("quota.jobs", "lab may have 1 open jobs, and has 1", hint, True)
        words = ("submit", "--recipe", "sub/job.yaml", "--dry-run", "--organization", "lab")
        done = run(*words)
        assert done.status == 0
        assert "It would be refused for now: lab may have 1 open jobs" in done.out
        assert hint in done.out
        assert run(*words, "--json").json["not_now"]["code"] == "quota.jobs"

    def test_a_dry_run_needs_no_grid(self, offline: Run) -> None:
        words = ("submit", "--recipe", "sub/job.yaml", "--dry-run", "--url", "http://127.0.0.1:9")
        assert offline(*words, "--json").json["plan"]["nodes"] == 1
        done = offline(*words)
        assert done.status == 0
        assert "No orchestrator answers" in done.err

    def test_paths_are_relative_to_the_recipe(self, run: Run, rooms: Orchestrator) -> None:
        done = run("submit", "--recipe", "sub/job.yaml", "--yes", "--no-follow")
        assert done.status == 0, done.err
        (job,) = rooms.jobs.values()
        assert done.out.strip() == job.id
        assert f"distribai job accept {job.id}" in done.err

    def test_without_a_terminal_it_needs_a_yes(
        self, run: Run, rooms: Orchestrator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(submit.sys.stdin, "isatty", lambda: False, raising=False)
        done = run("submit", "--recipe", "sub/job.yaml")
        assert done.status == 2
        assert "--yes" in done.err
        assert not rooms.jobs

    @pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 2), ("\n", 2)])
    def test_a_person_is_asked(
        self,
        run: Run,
        rooms: Orchestrator,
        monkeypatch: pytest.MonkeyPatch,
        answer: str,
        status: int,
    ) -> None:
        class Terminal:
            def isatty(self) -> bool:
                return True

            def readline(self) -> str:
                return answer

        monkeypatch.setattr("sys.stdin", Terminal())
        done = run("submit", "--recipe", "sub/job.yaml", "--no-follow")
        assert done.status == status
        assert "Submit this job?" in done.err
        assert "inner_steps: 10" in done.err
        assert "weight_decay" not in done.err, "only what is not as by default"
        assert ("--accept" in done.err) is (status == 0)
        assert bool(rooms.jobs) is (status == 0)

    def test_the_same_key_makes_one_job(self, run: Run, rooms: Orchestrator) -> None:
        words = ("submit", "--recipe", "sub/job.yaml", "--yes", "--json", "--idempotency-key", "k")
        assert run(*words).json == run(*words).json
        assert len(rooms.jobs) == 1


def test_passes_over_the_data_are_told_for_people() -> None:
    told = [dict(submit.plan_facts(planned(epochs=e))).get("epochs") for e in (57.8, 2.5, 0.25)]
    assert told == ["about 58 passes over the data", "2.50 passes over the data", "0.25"]
    assert "epochs" not in dict(submit.plan_facts(planned(epochs=None)))


def test_a_plan_says_for_which_machines_it_is_and_how_many_are_here() -> None:
    told = [
        submit.nodes_words(planned(nodes=2).model_copy(update={"here": here, "resting": resting}))
        for here, resting in ((None, None), (2, 0), (5, 0), (1, 0), (0, 1), (0, 2))
    ]
    assert told == [
        "2",
        "2, here now",
        "2 of the 5 that are here now",
        "2, 1 of them here now: 1 more must come",
        "2, none is here yet: 2 more must come; 1 node is online and takes no tasks (paused, "
        "leaving or shut out)",
        "2, none is here yet: 2 more must come; 2 nodes are online and take no tasks (paused, "
        "leaving or shut out)",
    ]


def test_versions_say_of_which_a_snapshot_is_kept() -> None:
    kept = VersionRecord(
        version=1,
        weights_hash="ab" * 32,
        weights=BlobRef("cd" * 32, 1_700_000),
        update=None,
        contributors=2,
        tokens=5,
        held_out_loss=None,
        created_at=1.8e9,
    )
    made = kept.model_copy(update={"version": 2, "weights": None})
    head, first, second = versions_table([kept, made]).splitlines()
    assert "SNAPSHOT" in head
    assert "kept, 1.7 MB" in first
    assert "on demand" in second


def test_a_plan_tells_what_is_fetched_once_and_why_one_node_saves_nothing() -> None:
    told = dict(submit.plan_facts(planned(once_bytes=17_600_000, data_parallel_ratio=None)))
    assert told["bytes"].endswith("on each node at most 17.6 MB of data and first weights")
    assert told["against data-parallel"] == "one node alone would move nothing"


def planned(**changes: float | None) -> PlanAnswer:
    figures = dict.fromkeys((f.name for f in fields(Plan)), 1) | changes
    return PlanAnswer(spec=spec(), plan=figures)
