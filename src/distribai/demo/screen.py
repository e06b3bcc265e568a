"""What the demo shows at its end: a curve and the figures."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from distribai.api.answers import JobRecord
from distribai.cli import output


def ring_bytes(parameters: int, steps: int, nodes: int) -> float:
    """What one node of fp32 data-parallel training sends and receives over ``steps`` steps:
    ``16 (K - 1) / K`` bytes per parameter and step (algorithms.md A9)."""
    return 16.0 * (nodes - 1) / nodes * parameters * steps


def loss_plot(losses: list[tuple[int, float]]) -> str:
    """Held-out loss over versions, as text as wide as the terminal allows."""
    import plotext

    width = min(76, shutil.get_terminal_size((80, 24)).columns)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, 14)
    plotext.title("held-out loss (nats per byte) by version")
    plotext.plot([v for v, _ in losses], [x for _, x in losses], marker="braille")
    plotext.xticks(sorted({v for v, _ in losses[:: max(1, len(losses) // 6)]} | {losses[-1][0]}))
    text: str = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo reports at its end."""

    job: JobRecord
    nodes: int
    seconds: float
    sample: str
    prompt: str
    weights: str
    weights_bytes: int


def summary(result: Result) -> str:
    """The figures for a person."""
    job = result.job
    losses = [(h.version, h.loss) for h in job.held_out if h.loss is not None]
    moved = (job.bytes.weights_up + job.bytes.weights_down) / result.nodes
    parallel = ring_bytes(job.parameters, job.spec.steps, result.nodes)
    lines = [loss_plot(losses), ""] if len(losses) > 1 else []
    facts = [
        ("model", f"{job.spec.model.profile}, {job.parameters:,} parameters, bytes in, bytes out"),
        ("trained", f"{job.rounds_total} rounds of {job.spec.rounds.inner_steps} steps on "
         f"{result.nodes} nodes, {job.tokens:,} tokens in {output.duration(result.seconds)}"),
    ]  # fmt: skip
    if losses:
        first, last = losses[0], losses[-1]
        facts.append(
            (
                "held-out loss",
                f"{first[1]:.3f} before (version {first[0]}), "
                f"{last[1]:.3f} after (version {last[0]})",
            )
        )
    if moved:
        facts.append(
            (
                "weights on the wire",
                f"{output.size(moved)} a node; data-parallel: {output.size(parallel)}, "
                f"{parallel / moved:.0f} times as much",
            )
        )
    facts += [
        ("data on the wire", f"{output.size(job.bytes.data_down / result.nodes)} a node, once"),
        ("weights", f"{result.weights} ({output.size(result.weights_bytes)})"),
    ]
    lines += [output.facts(facts), "", f"A sample, from the prompt {result.prompt!r}:", ""]
    lines += ["    " + output.visible(line) for line in (result.prompt + result.sample).split("\n")]
    return "\n".join(lines)
