"""What a delivery says, and who may be sent to: shared by the duty and by tests of a webhook."""

from __future__ import annotations

import json

from distribai import __version__
from distribai.core.addresses import Rule, own_lan_too, parse_target, public_only
from distribai.core.plain import to_plain
from distribai.core.webhooks import SIGNATURE_HEADER, secret_of, sign
from distribai.orchestrator.context import Grid
from distribai.orchestrator.records import EventRecord
from distribai.orchestrator.webhooks.keys import key_of
from distribai.orchestrator.webhooks.sending import Answer, Sender
from distribai.store.engine import AnyRow


def rule_of(grid: Grid) -> Rule:
    """Which addresses this grid's webhooks may go to."""
    return own_lan_too if grid.settings.webhooks.allow_private else public_only


def sender_of(grid: Grid) -> Sender:
    """How deliveries leave this process."""
    return Sender(rule_of(grid), grid.clock)


async def send(
    grid: Grid, sender: Sender, hook: AnyRow, delivery_id: str, event: EventRecord
) -> Answer:
    """One try. The time under the signature is the database's.

    Raises:
        Unavailable: ``webhook.key``; ``grid.database``.
    """
    document = {
        "delivery": delivery_id,
        "webhook": hook.id,
        "grid": grid.grid_id,
        "event": to_plain(event),
    }
    body = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
    secret = secret_of(key_of(grid), hook.id)
    headers = {
        "User-Agent": f"distribai/{__version__}",
        "X-DistribAI-Event": event.kind,
        "X-DistribAI-Delivery": delivery_id,
        SIGNATURE_HEADER: sign(secret, int(await grid.db.now()), body),
    }
    return await sender.post(parse_target(hook.url), headers, body)
