"""What people see of forecasts, proposals and what became of them: pure functions to text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distribai.cli import output

if TYPE_CHECKING:
    from distribai.core.forecast import Forecast, NodeForecast
    from distribai.core.phases import Measured
    from distribai.core.proposal import Proposal

_TYPICAL = "a typical home"
"""What a machine is called that stands in for one that must come."""

MAX_REASONS = 10
"""Reasons of slow nodes that are listed; how many more there are is said."""


def forecast_facts(found: Forecast | None) -> list[tuple[str, str]]:
    """How a job would go."""
    if found is None:
        return []
    from distribai.core.forecast import duration

    whole = output.duration(found.hours * 3600)
    first = f"; {duration(found.once_s)} of it for the data at first" if found.once_s >= 1 else ""
    pairs = [
        ("time", f"{whole}, {duration(found.round_s)} a round{first}"),
        ("a round", forecast_words(found)),
    ]
    slow: dict[str, list[str]] = {}
    for node in found.nodes:
        if node.why_slow:
            slow.setdefault(node.why_slow, []).append(_name(node))
    for why, names in list(slow.items())[:MAX_REASONS]:
        what = "typical home" if set(names) == {_TYPICAL} else "machine"
        who = names[0] if len(names) == 1 else output.plural(len(names), what)
        pairs.append((f"slow: {who}", output.visible(why)))
    if len(slow) > MAX_REASONS:
        pairs.append(("slow as well", f"for {len(slow) - MAX_REASONS} more reasons (--json)"))
    for node in found.nodes:
        if node.hours_without is not None:
            left = output.duration(node.hours_without * 3600)
            pairs.append((f"without {_name(node)}", f"{left} instead of {whole}"))
    return [*pairs, *(("assumed", text) for text in found.assumed)]


def _name(node: NodeForecast) -> str:
    """A machine in words; those of others have no id."""
    return node.node_id[:13] or (_TYPICAL if node.stands_in else "another's machine")


def forecast_words(found: Forecast) -> str:
    """The phases of a usual node's round, as forecast."""
    taking_part = [n for n in found.nodes if n.inner_steps] or found.nodes
    mean = [
        sum(getattr(n, phase) for n in taking_part) / len(taking_part)
        for phase in ("compute_s", "download_s", "upload_s", "waiting_s")
    ]
    return _phases(found.compute_share, *mean)


def measured_words(found: Measured) -> str:
    """The phases of a usual node's round, as they were."""
    told = _phases(
        found.compute_share, found.compute_s, found.download_s, found.upload_s, found.waiting_s
    )
    return f"{told}, in {output.plural(found.rounds, 'round')}"


def _phases(share: float, compute: float, download: float, upload: float, waiting: float) -> str:
    named = (
        ("inner steps", compute),
        ("download", download),
        ("upload", upload),
        ("waiting", waiting),
    )
    return f"{share:.1%} at inner steps: " + ", ".join(f"{s:.3g} s {name}" for name, s in named)


def proposal_words(found: Proposal) -> str:
    """What would go better, as lines of a recipe."""
    if not found.changes:
        return f"Keep the settings of rounds: {found.reason}."
    lines = ""
    for section in dict.fromkeys(name.partition(".")[0] for name in found.changes):
        lines += f"\n  {section}:"
        for name, value in found.changes.items():
            if name.startswith(f"{section}."):
                lines += f"\n    {name.partition('.')[2]}: {value}"
    return (
        f"Better for these machines: {found.reason}. It would take "
        f"{output.duration(found.forecast.hours * 3600)}. In the recipe:\n{lines}"
    )
