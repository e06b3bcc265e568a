"""``distribai submit``: a recipe becomes a job, after a look at what it takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect
from distribai.cli.forecast import forecast_facts, proposal_words
from distribai.cli.job import Organization
from distribai.cli.words import waits_words
from distribai.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from distribai.api.answers import PlanAnswer
    from distribai.client import Client
    from distribai.core.spec import JobSpec


def submit(
    *,
    recipe: Annotated[str, Parameter(help="The recipe, YAML or JSON; `-` reads stdin.")],
    dry_run: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Show the effective spec and the plan, do nothing.",
        ),
    ] = False,
    yes: Annotated[
        bool, Parameter(name=("--yes", "-y"), negative="", show_default=False, help="Do not ask.")
    ] = False,
    organization: Organization = "",
    accept: Annotated[
        bool, Parameter(negative="", show_default=False, help="Accept it at once.")
    ] = False,
    follow: Annotated[
        bool, Parameter(negative="--no-follow", help="Follow it until it ends.")
    ] = True,
    idempotency_key: Annotated[
        str, Parameter(help="Sending the same key and job again makes no second one.")
    ] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> int:
    """Submit a job from a recipe file.

    Shows what the recipe chooses and the plan (with --dry-run the whole spec), asks, uploads,
    submits and follows the job. With --json it prints the plan (with --dry-run) or the job, and
    does not follow. A recipe, more of which is in docs/how-to/recipes.md:

        name: shakespeare
        steps: 1000
        model: {profile: small}
        data: {files: [corpus.txt]}
        workers_min: 2
    """
    from distribai.cli import prepare

    prepared = prepare.from_file(recipe)
    with connect(reach) as client:
        if dry_run:
            _show_plan(_plan(client, prepared.spec, organization), as_json, on_stdout=True)
            return 0
        planned = client.plan(prepared.spec, organization)
        if not as_json:
            _show_plan(planned, False, on_stdout=False)
        if not yes:
            _ask()
        prepared.upload(client)
        other = prepare.namesake(client, prepared.spec.name)
        made = client.create_job(prepared.spec, idempotency_key, organization)
        if accept:
            made = client.accept(made.id)
        if other and made.id not in other:
            output.note(other)
        if as_json:
            output.document(made)
            return 0
        output.data(made.id)
        if made.state == "submitted":
            output.note(waits_words(client, made.id, "submit --accept"))
        if not follow:
            return 0
        from distribai.cli.job_watch import follow as follow_job

        return follow_job(client, made.id, as_json=False)


def nodes_words(planned: PlanAnswer) -> str:
    """For how many devices the plan is, and how many of them are here."""
    count, here = int(planned.plan["nodes"]), planned.here
    if here is None:
        return str(count)
    if here == count:
        words = f"{count}, here now"
    elif here > count:
        words = f"{count} of the {here} that are here now"
    else:
        missing = "none is here yet" if not here else f"{here} of them here now"
        words = f"{count}, {missing}: {count - here} more must come"
    if planned.resting:
        one = planned.resting == 1
        who = (
            "1 node is online and takes" if one else f"{planned.resting} nodes are online and take"
        )
        words += f"; {who} no tasks (paused, leaving or shut out)"
    return words


def plan_facts(planned: PlanAnswer) -> list[tuple[str, str]]:
    """The planner's figures, for people."""
    plan = planned.plan
    ratio, epochs = plan.get("data_parallel_ratio"), plan.get("epochs")
    pairs = [
        ("nodes", nodes_words(planned)),
        ("rounds", str(plan["rounds"])),
        ("tasks", f"{plan['tasks']} to train, {plan['evaluations']} to evaluate"),
        ("parameters", output.count(plan["parameters"])),
        ("memory", f"{output.size(plan['memory_bytes'])} on each node"),
        (
            "bytes",
            f"{output.size(plan['bytes_up'])} up, {output.size(plan['bytes_down'])} down for each "
            f"node; {output.size(plan['bytes_total'])} in all, and before them on each node at "
            f"most {output.size(plan['once_bytes'])} of data and first weights",
        ),
        ("tokens", output.count(plan["tokens"])),
    ]
    fewer = (
        "one node alone would move nothing" if ratio is None else f"{ratio:.0f} times fewer bytes"
    )
    pairs.append(("against data-parallel", fewer))
    if epochs is not None:
        told = f"about {epochs:.0f}" if epochs >= 9.5 else f"{epochs:.2f}"
        pairs.append(("epochs", f"{told} passes over the data" if epochs > 1 else told))
    return pairs


def _plan(client: Client, spec: JobSpec, organization: str) -> PlanAnswer:
    """The grid's plan, for the nodes that it has; without a grid one for the fewest possible."""
    try:
        return client.plan(spec, organization)
    except Unavailable as problem:
        if problem.code != "grid.unreachable":
            raise
    from distribai.api.answers import PlanAnswer
    from distribai.core.forecast import forecast, overhead_of
    from distribai.core.plain import to_plain
    from distribai.core.plan import parameter_count, plan
    from distribai.core.proposal import propose

    output.note(
        f"No orchestrator answers at {client.url}: planned for "
        f"{output.plural(spec.workers_min, 'node')}."
    )
    figures = to_plain(plan(spec, parameter_count(spec), spec.workers_min))
    overhead = overhead_of(spec, None)
    return PlanAnswer(
        spec=spec,
        plan=figures,
        forecast=forecast(spec, [], overhead),
        proposal=propose(spec, [], overhead),
    )


def _show_plan(planned: PlanAnswer, as_json: bool, on_stdout: bool) -> None:
    if as_json:
        output.document(planned)
        return
    spec = planned.spec
    from distribai.api.recipe import chosen_text, effective_text

    say = output.data if on_stdout else output.note
    if on_stdout:
        title, text = "The effective spec:", effective_text(spec)
    else:
        title, text = "The job, all else as by default (--dry-run shows it):", chosen_text(spec)
    say(f"{title}\n")
    say("\n".join(f"    {line}" for line in text.splitlines()))
    say("\nThe plan:\n")
    facts = output.facts([*plan_facts(planned), *forecast_facts(planned.forecast)])
    say("\n".join(f"    {line}" for line in facts.splitlines()) + "\n")
    if (full := planned.not_now) is not None:
        say(f"It would be refused for now: {full.reason} [{full.code}]. {full.hint}\n")
    if planned.proposal is not None:
        say(proposal_words(planned.proposal) + "\n")


def _ask() -> None:
    """Let a person say yes.

    Raises:
        UsageError: there is no terminal to ask on, or the answer is no.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "usage.invalid",
            "There is no terminal to ask for a go-ahead on.",
            "Give `--yes` to submit without asking, or `--dry-run` to only look.",
        )
    sys.stderr.write("Submit this job? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("usage.declined", "Nothing was submitted.", "")
