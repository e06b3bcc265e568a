"""The live display of ``job watch`` on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distribai.cli import job_views, output

if TYPE_CHECKING:
    from distribai.api.answers import JobRecord


class LiveDisplay:
    """One panel that replaces itself; the last one stays on the terminal."""

    def __init__(self) -> None:
        self._live = Live(auto_refresh=False, vertical_overflow="visible")
        self._live.start()

    def show(self, job: JobRecord) -> None:
        """Draw the job as it stands."""
        self._live.update(panel(job), refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()


def panel(job: JobRecord) -> Panel:
    """What a person wants to know at a glance."""
    done, r = float(job.version), job_views.active_round(job)
    if r is not None and r.steps:
        done += min(r.step / r.steps, 1.0)
    bar = ProgressBar(total=max(job.rounds_total, 1), completed=done, width=40)
    facts = Table.grid(padding=(0, 2))
    facts.add_row(Text("progress", style="dim"), bar)
    for name, value in live_facts(job):
        facts.add_row(Text(name, style="dim"), Text(output.visible(value)))
    title = Text(output.visible(f"{job.name}  {job.id[:12]}"))
    return Panel(facts, title=title, title_align="left", width=76)


def live_facts(job: JobRecord) -> list[tuple[str, str]]:
    """The display's lines."""
    pairs = [("state", job.state + (f": {job.reason}" if job.reason else ""))]
    if job.waiting_for:
        pairs.append(("waiting for", job.waiting_for))
    r = job_views.active_round(job)
    if r is None:
        pairs.append(("round", f"{job.version} of {job.rounds_total}"))
    else:
        pairs.append(
            (
                "round",
                f"{r.number + 1} of {job.rounds_total}, step {r.step:.0f} of {r.steps}, "
                f"{r.submitted} of {r.slots} in",
            )
        )
        pairs.append(("nodes", f"{job.nodes_working} at work"))
        pairs.append(("loss", output.loss(r.mean_loss)))
    pairs.append(("held-out", job_views.held_out_words(job) or "-"))
    if r is not None:
        pairs.append(("speed", f"{output.count(r.tokens_per_s)} tokens/s"))
    pairs.append(("bytes", job_views.bytes_words(job)))
    eta = job_views.eta_s(job)
    if r is not None or eta is not None:
        pairs.append(("ETA", output.duration(eta)))
    return pairs
