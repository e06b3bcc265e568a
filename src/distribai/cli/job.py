"""``distribai job``: create jobs, decide on them, look at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import App, Parameter

from distribai.cli import events, job_views, output, why
from distribai.cli.connection import Reach, connect
from distribai.cli.words import waits_words

if TYPE_CHECKING:
    from distribai.api.answers import JobId
    from distribai.client import Client

T = TypeVar("T")

app = App(name="job", help="Create jobs, decide on them, follow them.")
app.command(why.job_why, name="why")
app.command(events.job_events, name="events")

Organization = Annotated[
    str,
    Parameter(
        help="The organization whose job it is.  [default: the only one that you are a member of]"
    ),
]
Ref = Annotated[str, Parameter(help="A job's id, a unique beginning of it, or its name.")]


@app.command
def create(
    name: Annotated[str, Parameter(help="The job's name.")],
    steps: Annotated[int, Parameter(help="Inner steps per worker.")],
    /,
    *,
    profile: Annotated[
        str, Parameter(help="Size of the model: tiny, small, base, medium, large, xl.")
    ] = "tiny",
    data: Annotated[
        list[str] | None,
        Parameter(
            consume_multiple=True,
            negative="",
            help="Files of text or .jsonl, or a built-in data set's name.  [default: stdlib]",
        ),
    ] = None,
    batch: Annotated[int | None, Parameter(help="Sequences per worker and step.")] = None,
    seq_len: Annotated[int | None, Parameter(help="Tokens per sequence.")] = None,
    inner_steps: Annotated[int | None, Parameter(help="Inner steps per round (H).")] = None,
    preset: Annotated[
        str | None, Parameter(help="Settings of rounds by name: default, fast, silent.")
    ] = None,
    lr: Annotated[float | None, Parameter(help="Peak learning rate of AdamW.")] = None,
    seed: Annotated[int | None, Parameter(help="Seed of weights and order.")] = None,
    workers_min: Annotated[int | None, Parameter(help="Nodes to wait for.")] = None,
    workers_max: Annotated[int | None, Parameter(help="Nodes to use at most.")] = None,
    priority: Annotated[str | None, Parameter(help="P0 (first) to P3.")] = None,
    organization: Organization = "",
    accept: Annotated[
        bool, Parameter(negative="", show_default=False, help="Accept it at once.")
    ] = False,
    idempotency_key: Annotated[
        str, Parameter(help="Sending the same key and job again makes no second one.")
    ] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Create a training job.

    It waits for the operator's word, unless its organization's policy accepts it; an operator's
    `--accept` gives it at once.
    """
    from distribai.cli import prepare

    values = prepare.recipe_values(
        name=name,
        steps=steps,
        profile=profile,
        data=data or [],
        optional={
            "batch": batch,
            "seq_len": seq_len,
            "seed": seed,
            "preset": preset,
            "workers_min": workers_min,
            "workers_max": workers_max,
            "priority": priority,
        },
        inner_steps=inner_steps,
        lr=lr,
    )
    prepared = prepare.from_values(values, "the command line")
    with connect(reach) as client:
        prepared.upload(client)
        other = prepare.namesake(client, name)
        made = client.create_job(prepared.spec, idempotency_key, organization)
        if accept:
            made = client.accept(made.id)
        if other and made.id not in other:
            output.note(other)
        _created(client, made, as_json)


@app.command(name="accept")
def accept_job(ref: Ref, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Accept a submitted job.

    It runs as soon as there are nodes for it.
    """
    with connect(reach) as client:
        _change(client, ref, client.accept, "accepted", as_json)
        if not as_json:
            output.note(f"Follow it: distribai job watch {ref}")


@app.command
def decline(
    ref: Ref,
    /,
    *,
    why: Annotated[str, Parameter(help="The reason, for whoever asked.")],
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Decline a submitted job."""
    with connect(reach) as client:
        _change(client, ref, lambda r: client.decline(r, why), "declined", as_json)


@app.command
def cancel(
    ref: Ref,
    /,
    *,
    why: Annotated[str, Parameter(help="The reason, for the record.")] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Cancel a job that has not ended.

    The versions made so far stay.
    """
    with connect(reach) as client:
        _change(client, ref, lambda r: client.cancel(r, why), "cancelled", as_json)


@app.command
def pause(ref: Ref, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Let a running job rest.

    No new work is given out until it is resumed.
    """
    with connect(reach) as client:
        _change(client, ref, client.pause, "paused", as_json)


@app.command
def resume(ref: Ref, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Let a paused job go on."""
    with connect(reach) as client:
        _change(client, ref, client.resume, "resumed", as_json)


@app.command
def retry(
    ref: Ref,
    /,
    *,
    accept: Annotated[
        bool, Parameter(negative="", show_default=False, help="Accept it at once.")
    ] = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Try again what failed or was cancelled.

    It makes a new job that does the steps that are left, from the last version.
    """
    with connect(reach) as client:
        made = client.retry(ref)
        if accept:
            made = client.accept(made.id)
        _created(client, made, as_json)


@app.command
def weight(
    ref: Ref,
    value: Annotated[float, Parameter(help="From 1/16 to 16; 1 is usual.")],
    /,
    *,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Let a job weigh more or less than others of its tier.

    The heavier job of an organization goes first, and the organization's share grows with it.
    """
    with connect(reach) as client:
        made = client.weigh(ref, value)
    if as_json:
        output.document(made)
    else:
        output.data(f"{made.id} weighs {value:g} now.")


@app.command(name="list")
def list_jobs(
    *,
    state: Annotated[str | None, Parameter(help="Only jobs in this state.")] = None,
    watch: output.Watch = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """List jobs, newest first."""
    _listing(
        reach,
        lambda client: list(client.jobs(state)),
        job_views.jobs_table,
        "There is no job yet: `distribai job create my-model 1000` makes one.",
        watch,
        as_json,
    )


@app.command
def show(ref: Ref, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Show everything about a job."""
    with connect(reach) as client:
        found = client.job(ref)
    if as_json:
        output.document(found)
    else:
        output.data(output.facts(job_views.job_facts(found)))


@app.command
def watch(ref: Ref, /, *, as_json: output.Json = False, reach: Reach | None = None) -> int:
    """Follow a job until it ends.

    Exit status 0 when it completed, 1 when it did not. Ctrl-C only ends the watching. With --json
    it prints one document a line.
    """
    from distribai.cli.job_watch import follow

    with connect(reach) as client:
        return follow(client, ref, as_json)


@app.command
def logs(
    ref: Ref,
    /,
    *,
    follow: Annotated[
        bool,
        Parameter(
            name=("--follow", "-f"),
            negative="",
            show_default=False,
            help="Go on until the job ends.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        Parameter(
            name="--json", negative="", show_default=False, help="Print one JSON document a line."
        ),
    ] = False,
    reach: Reach | None = None,
) -> None:
    """Show what nodes and orchestrator wrote about a job."""
    from distribai.cli.job_watch import stream_logs

    with connect(reach) as client:
        stream_logs(client, ref, follow, as_json)


@app.command
def rounds(
    ref: Ref,
    /,
    *,
    watch: output.Watch = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """List a job's rounds, oldest first."""
    _listing(
        reach,
        lambda client: client.rounds(ref),
        job_views.rounds_table,
        "No round has begun.",
        watch,
        as_json,
    )


@app.command
def tasks(
    ref: Ref,
    /,
    *,
    watch: output.Watch = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """List a job's tasks, oldest first."""
    _listing(
        reach,
        lambda client: list(client.tasks(ref)),
        job_views.tasks_table,
        "The job has no tasks yet.",
        watch,
        as_json,
    )


@app.command
def versions(
    ref: Ref,
    /,
    *,
    watch: output.Watch = False,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """List the versions of a job's weights, and of which a snapshot is kept.

    The weights of a version without one (`on demand`) are made again, from the latest kept one
    before it and the updates since, when they are asked for.
    """
    _listing(
        reach,
        lambda client: client.versions(ref),
        job_views.versions_table,
        "The job has no weights yet.",
        watch,
        as_json,
    )


def _listing(
    reach: Reach | None,
    ask: Callable[[Client], list[T]],
    render: Callable[[list[T]], str],
    empty: str,
    watch: bool,
    as_json: bool,
) -> None:
    with connect(reach) as client:
        if watch:
            from distribai.cli.watching import repeat

            repeat(lambda: ask(client), render, as_json)
            return
        found = ask(client)
    if as_json:
        output.document(found)
    elif found:
        output.data(render(found))
    else:
        output.note(empty)


def _created(client: Client, made: JobId, as_json: bool) -> None:
    if as_json:
        output.document(made)
        return
    output.data(made.id)
    if made.state != "submitted":
        output.note(f"Accepted. Follow it: distribai job watch {made.id}")
    else:
        output.note(waits_words(client, made.id))


_LEAVES = {"accepted": ("submitted",), "resumed": ("paused",)}
"""From where a command changes a job, when it leads to more than the state of its own name."""


def _change(
    client: Client, ref: str, act: Callable[[str], JobId], what: str, as_json: bool
) -> None:
    """Change a job and say what it is now, or that it was so before."""
    if as_json:
        output.document(act(ref))
        return
    before = client.job(ref)
    job = act(before.id)
    unchanged = before.state not in _LEAVES[what] if what in _LEAVES else before.state == what
    is_now = "" if job.state == what else f"; it is {job.state} now"
    if unchanged:
        output.data(f"{job.id} was {what} already{is_now}.")
    elif is_now:
        output.data(f"{job.id} {what}{is_now}.")
    else:
        output.data(f"{job.id} is {what} now.")
