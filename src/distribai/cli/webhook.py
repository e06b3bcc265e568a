"""``distribai webhook``: events that are posted to an address, signed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from distribai.cli import output
from distribai.cli.connection import Reach, connect

if TYPE_CHECKING:
    from distribai.api.answers import DeliveryRecord, WebhookRecord

app = App(name="webhook", help="Let events be posted to an address, signed.")

Id = Annotated[str, Parameter(help="The webhook's id.")]


@app.command
def create(
    url: Annotated[str, Parameter(help="Where events are posted: https://...")],
    /,
    *,
    kind: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            help="Only this kind (`job.completed`) or family (`job.*`); repeat it.  [default: all]",
        ),
    ] = None,
    idempotency_key: Annotated[
        str, Parameter(help="Sending the same key and webhook again makes no second one.")
    ] = "",
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Make a webhook for what happens from now on.

    Prints its id and the secret with which deliveries are signed; the secret is not shown again.
    """
    with connect(reach) as client:
        made = client.create_webhook(url, kind or (), idempotency_key)
    if as_json:
        output.document(made)
        return
    output.data(output.facts([("id", made.id), ("secret", made.secret)]))
    output.note("Keep the secret: it is shown only now.")
    output.note(f"Try it: distribai webhook test {made.id}")


@app.command(name="list")
def list_webhooks(*, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """List the webhooks."""
    with connect(reach) as client:
        found = list(client.webhooks())
    if as_json:
        output.document(found)
    elif found:
        output.data(
            output.table(
                ("ID", "STATE", "EVENTS", "QUEUED", "FAILURES", "URL"),
                [(h.id, h.state, _kinds(h), str(h.queued), str(h.failures), h.url) for h in found],
            )
        )
    else:
        output.note("There is no webhook: `distribai webhook create URL` makes one.")


@app.command
def show(webhook: Id, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Show a webhook: what waits for it, and whether it fails."""
    from distribai.cli.job_views import moment

    with connect(reach) as client:
        found = client.webhook(webhook)
    if as_json:
        output.document(found)
        return
    pairs = [
        ("id", found.id),
        ("url", found.url),
        ("events", _kinds(found)),
        ("state", found.state + (f": {found.reason}" if found.reason else "")),
        ("made", f"{moment(found.created_at)} by the {found.created_by}"),
        ("waiting", output.plural(found.queued, "event")),
        ("last delivered", "-" if found.delivered_at is None else moment(found.delivered_at)),
    ]
    if found.failing_since is not None:
        tries = output.plural(found.failures, "failure")
        pairs.append(("failing", f"since {moment(found.failing_since)}, {tries}"))
    output.data(output.facts(pairs))


@app.command
def delete(webhook: Id, /, *, reach: Reach | None = None) -> None:
    """Delete a webhook with the log of its deliveries."""
    with connect(reach) as client:
        client.delete_webhook(webhook)
    output.note("The webhook is deleted.")


@app.command
def enable(webhook: Id, /, *, as_json: output.Json = False, reach: Reach | None = None) -> None:
    """Deliver to a disabled webhook again, from now on.

    What happened meanwhile: `distribai events`.
    """
    with connect(reach) as client:
        found = client.enable_webhook(webhook)
    if as_json:
        output.document(found)
    else:
        output.note(f"The webhook is {found.state}.")


@app.command(name="test")
def send_test(webhook: Id, /, *, as_json: output.Json = False, reach: Reach | None = None) -> int:
    """Send one `webhook.test` now.

    Exit status 0 when the receiver took it, 1 when it did not.
    """
    with connect(reach) as client:
        found = client.test_webhook(webhook)
    taken = found.state == "delivered"
    if as_json:
        output.document(found)
    elif taken:
        output.data(f"Delivered: the receiver answered {found.status}.")
    else:
        output.data(output.visible(f"Not delivered: {found.reason}."))
    return 0 if taken else 1


@app.command
def deliveries(
    webhook: Id,
    /,
    *,
    limit: Annotated[int, Parameter(help="So many of the newest.")] = 50,
    as_json: output.Json = False,
    reach: Reach | None = None,
) -> None:
    """Show the log of a webhook's deliveries, newest first."""
    from itertools import islice

    with connect(reach) as client:
        found = list(islice(client.deliveries(webhook), max(0, limit)))
    if as_json:
        output.document(found)
    elif found:
        output.data(
            output.table(
                ("ID", "AT", "EVENT", "STATE", "TRIES", "STATUS", "REASON"),
                list(map(_row, found)),
            )
        )
    else:
        output.note("Nothing was sent yet: `distribai webhook test ID` sends a test.")


def _row(found: DeliveryRecord) -> tuple[str, ...]:
    from distribai.cli.job_views import moment

    at = found.created_at if found.attempted_at is None else found.attempted_at
    status = "-" if found.status is None else str(found.status)
    return found.id, moment(at), found.kind, found.state, str(found.attempts), status, found.reason


def _kinds(found: WebhookRecord) -> str:
    return " ".join(found.kinds) or "all"
