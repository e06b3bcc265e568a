"""``why`` and ``events`` from the command line, and how logs are written."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from distribai import wishes
from distribai.cli import events, logs
from distribai.core import contact
from distribai.core.contact import Trouble
from distribai.core.sealed import seal
from distribai.core.traffic import FILE, Kept, Seen
from distribai.orchestrator.records import EventRecord
from tests.cli.conftest import Run
from tests.http.stand_in import NOW, Orchestrator, node_record


@pytest.fixture
def made(run: Run) -> str:
    job_id: str = run("job", "create", "my-model", "1000").out.strip()
    return job_id


def test_a_job_says_what_it_waits_for_and_what_to_try(run: Run, made: str) -> None:
    done = run("job", "why", "my-model")
    assert done.status == 0
    assert f"my-model ({made[:12]}) is submitted." in done.out
    assert "It waits for the operator's decision." in done.out
    assert "try: Accept it." in done.out


def test_a_wait_with_an_end_says_how_long_and_for_whom(run: Run, made: str) -> None:
    run("job", "accept", made)
    done = run("job", "why", made)
    assert "At most 20s more. (node_aaaabbbb)" in done.out
    assert run("job", "why", made, "--json").json["reasons"][0]["code"] == "grace"


@pytest.mark.parametrize("noun", ["nodes", "fleet"])
def test_a_node_says_what_it_holds_and_why_it_gets_no_more(
    run: Run, rooms: Orchestrator, noun: str
) -> None:
    rooms.nodes.append(node_record("one"))
    done = run(noun, "why", "one")
    assert "one (node_one) is online, trusted, wants to contribute; last heard 5s ago." in done.out
    assert "device 0 (cpu, 4096 MB): train task task_x of job_x, round 3, for 1m15s" in done.out
    assert "device 1 (cpu): free" in done.out
    assert "Job big does not fit its free devices" in done.out
    assert run(noun, "why", "one", "--json").json["able"] is True
    assert run(noun, "why", "nobody").status == 3


def test_events_of_a_node_and_of_a_job_are_listed_and_followed_from_a_cursor(
    run: Run, rooms: Orchestrator, made: str
) -> None:
    rooms.nodes.append(node_record("one"))
    data = {"phase": "train", "round": 0, "reason": ""}
    rooms.events.append(EventRecord("7", NOW, "task.leased", made, "task_a", "node_one", data))
    rooms.events.append(EventRecord("8", NOW, "node.offline", "", "", "node_one"))
    done = run("nodes", "events", "one")
    assert [line.split("  ")[1] for line in done.out.splitlines()] == [
        "task.leased",
        "node.offline",
    ]
    assert "phase=train round=1" in done.out
    behind = run("nodes", "events", "one", "--after", "7", "--json").json
    assert [e["kind"] for e in behind] == ["node.offline"]
    assert run("nodes", "events", "one", "--after", "8").err.startswith("Nothing has happened")
    assert [e["kind"] for e in run("job", "events", made, "--json").json] == [
        "job.submitted",
        "task.leased",
    ]


@pytest.mark.parametrize("flag", ["--watch", "--follow"])
def test_a_watched_feed_prints_each_event_once(
    run: Run, rooms: Orchestrator, made: str, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    printed: list[str] = []

    def first_three(event: EventRecord) -> None:
        printed.append(event.cursor)
        if len(printed) == 1:
            rooms.events.append(EventRecord("2", NOW, "job.queued", made, "", ""))
        if len(printed) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(events.output, "json_line", first_three)
    assert run("events", flag, "--json").status == 130
    assert printed == ["1", "2"]


@pytest.mark.parametrize("form", ["json", "console"])
def test_logs_are_written_as_told_and_carry_what_is_bound(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    config = structlog.get_config()
    try:
        logs.configure(debug=False, form=form)
        with structlog.contextvars.bound_contextvars(request_id="req_x"):
            structlog.get_logger("ours").info("said", n=1)
            logging.getLogger("theirs").warning("heard")
        lines = capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        structlog.configure(**config)
    assert len(lines) == 2
    assert all("req_x" in line for line in lines)
    if form == "json":
        assert [json.loads(line)["event"] for line in lines] == ["said", "heard"]
    else:
        assert "said: n 1, request_id req_x" in lines[0]


def test_a_format_that_does_not_exist_is_refused(
    offline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRIBAI_LOGS_FORMAT", "xml")
    done = offline("config", "show")
    assert done.status == 2
    assert "auto or console or json" in done.err


def test_the_operator_s_verbs_say_what_a_node_is_now(run: Run, rooms: Orchestrator) -> None:
    rooms.nodes.append(node_record("one"))
    done = run("nodes", "pause", "one")
    assert done.status == 0
    assert "is paused by the operator; it is online and hears of it in a moment." in done.out
    assert "finish what it has and leave" in run("fleet", "drain", "one").out
    assert "node_one may work again; it is online.\n" in run("nodes", "resume", "one").out
    done = run("nodes", "quarantine", "one", "--why", "it lies")
    assert "is quarantined now" in done.out
    assert run("nodes", "ban", "one", "--why", "x", "--json").json["standing"] == "banned"
    assert run("nodes", "pardon", "one", "--why", "x", "--json").json["standing"] == "probation"
    assert run("nodes", "trust", "one", "--why", "x", "--json").json["standing_reason"] == "x"
    assert run("nodes", "ban", "one").status == 2, "a reason must be given"
    assert run("nodes", "pause", "nobody").status == 3


def test_a_node_that_still_says_that_it_pauses_is_not_said_to_want_to(
    run: Run, rooms: Orchestrator
) -> None:
    rooms.nodes.append(replace(node_record("one"), intent="pause", ordered="pause"))
    done = run("nodes", "resume", "one")
    assert "may work again; it is online and hears of it in a moment" in done.out
    assert "If its owner has paused it too" in done.err
    assert "wants to" not in done.out


def test_a_node_that_rests_is_not_idle(run: Run, rooms: Orchestrator) -> None:
    idle = node_record("idle")
    rooms.nodes = [
        idle,
        replace(node_record("told"), ordered="pause"),
        replace(node_record("owner"), intent="pause", tasks=("task_a",)),
        replace(node_record("leaves"), ordered="drain"),
        replace(node_record("gone"), liveness="offline"),
    ]
    lines = run("nodes", "list").out.splitlines()[1:]
    words = {line.split()[0].removeprefix("node_"): line for line in lines}
    assert "idle" in words["idle"]
    for name, text in {
        "told": "  paused  ",
        "owner": "  1 task, paused  ",
        "leaves": "  leaving  ",
        "gone": "  -  ",
    }.items():
        assert text in words[name]
        assert "idle" not in words[name]


def test_a_job_is_retried_and_weighed(run: Run, rooms: Orchestrator) -> None:
    made = run("job", "create", "my-model", "1000", "--accept").out.strip()
    again = run("job", "retry", made)
    assert again.status == 0
    assert f"retry of     {made}".replace(" ", "") in run(
        "job", "show", again.out.strip()
    ).out.replace(" ", "")
    assert "weighs 4 now" in run("job", "weight", made, "4").out
    assert run("job", "show", made, "--json").json["weight"] == 4
    assert run("job", "weight", made, "nan").status == 2
    accepted = run("job", "retry", made, "--accept", "--json").json
    assert accepted["state"] == "queued"


def test_wishes_are_left_for_every_node_of_the_machine(offline: Run, home: Path) -> None:
    assert offline("node", "pause").status == 2
    for number in "12":
        (home / "state" / "nodes" / number).mkdir(parents=True)
        (home / "state" / "nodes" / number / "join").touch()
    (home / "state" / "nodes" / "3").mkdir()
    assert offline("node", "pause").out.count(": pause") == 2
    assert wishes.read(home / "state" / "nodes" / "2") == "pause"
    one = home / "state" / "nodes" / "1"
    assert offline("node", "finish", "--state-dir", str(one)).status == 0
    assert (wishes.read(one), wishes.read(one.parent / "2")) == ("finish", "pause")
    assert offline("node", "contribute").status == 0
    assert wishes.read(one) == "contribute"
    assert wishes.read(one.parent / "3") is None


def test_a_limit_of_nothing_is_said_to_be_none(offline: Run) -> None:
    done = offline("node", "start", "--up-mbps", "0", "--join", "nonsense")
    assert done.status == 2
    assert "--up-mbps 0 means: no limit." in done.err
    assert "--down-mbps" not in done.err


def test_a_node_tells_what_it_has_moved_and_why_it_rests(offline: Run, home: Path) -> None:
    assert offline("node", "status").status == 2
    state = home / "state" / "nodes" / "1"
    state.mkdir(parents=True)
    (state / "join").touch()
    fresh = offline("node", "status").out
    assert "contribute" in fresh
    assert "no limit up, no limit down" in fresh
    assert "not yet known up, not yet known down" in fresh
    kept = Kept(
        {"2026-11": 4_900_000_000},
        Seen(1e9, 800.0),
        Seen(1e9, 100.0),
        5,
        5 * 10**9,
        "it is used up",
        up_mbps=20.0,
        down_mbps=20.0,
    )
    (state / FILE).write_bytes(seal(kept))
    wishes.leave(state, "pause")
    told = offline("node", "status").out
    for words in ("pause", "2026-11", "4.9 GB moved of 5.0 GB", "it is used up"):
        assert words in told
    lines = {line.split("  ")[2].strip(): line for line in told.splitlines() if "Mbit/s" in line}
    assert "20 Mbit/s up, 20 Mbit/s down" in lines["limits of the line"]
    assert "10 Mbit/s up, 20 Mbit/s down" in lines["measured"], "small files pass at once"
    (found,) = offline("node", "status", "--json").json
    assert (found["why"], found["month_bytes"]) == ("it is used up", 5 * 10**9)
    assert (found["up_mbps"], found["measured_up_mbps"]) == (20, 10)
    (state / FILE).write_bytes(b"torn")
    assert offline("node", "status").status == 6


def test_a_node_that_is_not_connected_or_has_ended_says_why_and_what_to_try(
    offline: Run, home: Path
) -> None:
    state = home / "state" / "nodes" / "1"
    state.mkdir(parents=True)
    trouble = Trouble(1.8e9, "h:1 has cut the connection", "Ask for the new link.")
    (state / contact.FILE).write_bytes(seal(trouble))  # the grid has never taken it
    told = offline("node", "status").out
    assert "not connected" in told
    for words in (trouble.why, trouble.hint, "since 2027-01-1"):
        assert words in told
    assert offline("node", "pause").status == 2, "there is no node to leave word for"
    banned = Trouble(1.8e9, "The grid's operator has banned this node.", "Ask.", "node.banned")
    (state / contact.FILE).write_bytes(seal(banned))
    assert "has ended" in offline("node", "status").out
    (found,) = offline("node", "status", "--json").json
    assert (found["trouble"]["code"], found["trouble"]["why"]) == (banned.code, banned.why)


@pytest.mark.parametrize("flag", ["--month-gb", "--cache-gb", "--up-mbps"])
def test_a_limit_that_is_no_number_is_refused(offline: Run, home: Path, flag: str) -> None:
    for value in ("nan", "-1"):
        done = offline("node", "start", "--join", "x", flag, value)
        assert done.status == 2
        assert flag in done.err
